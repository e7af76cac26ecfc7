"""A Hugging Face folder with float safetensors as a WeightSource.

The `safetensors` library checks each header; the numbers are then read through a memory map, because its numpy side
has no bfloat16 and reading a shard whole would cost its size in memory. bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.families import spec_from_config
from edgekv.weights.base import Float32, TokenizerFiles

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}

_NAMES = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class SafetensorsSource:
    """A folder with config.json and *.safetensors, one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = spec_from_config(self._json("config.json"), self._json("generation_config.json", optional=True))
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}  # name -> file, offset of data, header entry
        for file in self._shards():
            self._read_header(file)

    @property
    def files(self) -> list[str]:
        """The shards, in order of name."""
        return sorted({str(file) for file, _, _ in self._entries.values()})

    @property
    def scheme(self) -> str:
        """The number types in it, most frequent first."""
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        kinds = Counter(entry["dtype"] for _, _, entry in self._entries.values())
        return ", ".join(names.get(kind, kind) for kind, _ in kinds.most_common())

    def matrix(self, name: str) -> Float32:
        """A weight [out, in] in float32."""
        return self._read(_hub_name(name), dimensions=2)

    def vector(self, name: str) -> Float32:
        """A norm's weight or a bias, in float32."""
        base = name.removesuffix(".bias")
        return self._read(_hub_name(base, "weight" if base == name else "bias"), dimensions=1)

    def tokenizer(self) -> TokenizerFiles:
        """tokenizer.json as it lies in the folder, with the template and special tokens of tokenizer_config.json."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise BadCheckpoint(
                f"{self.folder} has no tokenizer.json: copy the model's tokenizer files beside its weights."
            )
        config = self._json("tokenizer_config.json", optional=True)
        template_file = self.folder / "chat_template.jinja"
        template = template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
        text, bos = path.read_text("utf-8"), _token_text(config.get("bos_token"))
        return TokenizerFiles(
            tokenizer_json=text,
            chat_template=_default_template(template),
            bos_token=bos,
            eos_token=_token_text(config.get("eos_token")),
            add_bos=_adds_bos(path, text, bos),
        )

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        path = self.folder / name
        if optional and not path.exists():
            return {}
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{path} cannot be read as JSON: {error}.") from None
        if not isinstance(data, dict):
            raise BadCheckpoint(f"{path} holds {type(data).__name__}, not an object with fields.")
        return data

    def _shards(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            return sorted(self.folder.glob("*.safetensors"))
        names = sorted(set(self._json(index.name).get("weight_map", {}).values()))
        files = [self.folder / name for name in names]
        for name, file in zip(names, files, strict=True):
            if Path(name).name != name:
                raise BadCheckpoint(f"{index} names a file outside its folder: {name!r}.")
            if not file.exists():
                raise BadCheckpoint(
                    f"{self.folder} lacks {name}, one of {len(names)} shards its index names: download it."
                )
        return files

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{file} is not a whole safetensors file ({error}): download it again.") from None
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        self._entries |= {name: (file, 8 + size, entry) for name, entry in header.items()}

    def _read(self, name: str, *, dimensions: int) -> Float32:
        if name not in self._entries:
            raise BadCheckpoint(f"{self.folder} has no tensor {name}: the checkpoint is incomplete.")
        file, start, entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise UnsupportedModel(
                f"{name} in {file.name} is stored as {entry['dtype']}; edgekv reads F32, F16 and BF16."
            )
        shape = tuple(entry["shape"])
        if len(shape) != dimensions or shape != self._expected_shape(name):
            raise BadCheckpoint(
                f"{file.name}: {name} is {list(shape)}, but the config says {self._expected_shape(name)}."
            )
        raw = np.memmap(file, _DTYPES[entry["dtype"]], "r", start + entry["data_offsets"][0], shape)
        if entry["dtype"] == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(raw.astype(np.float32))

    def _expected_shape(self, name: str) -> tuple[int, ...]:
        spec = self.spec
        sizes = {
            "q_proj": (spec.num_heads * spec.head_dim, spec.hidden_size),
            "k_proj": (spec.num_kv_heads * spec.head_dim, spec.hidden_size),
            "v_proj": (spec.num_kv_heads * spec.head_dim, spec.hidden_size),
            "o_proj": (spec.hidden_size, spec.num_heads * spec.head_dim),
            "gate_proj": (spec.ffn_size, spec.hidden_size),
            "up_proj": (spec.ffn_size, spec.hidden_size),
            "down_proj": (spec.hidden_size, spec.ffn_size),
            "embed_tokens": (spec.vocab_size, spec.hidden_size),
            "lm_head": (spec.vocab_size, spec.hidden_size),
        }
        module, kind = name.split(".")[-2:]
        shape = sizes.get(module, (spec.hidden_size,))
        return shape[:1] if kind == "bias" else shape


def _hub_name(name: str, kind: str = "weight") -> str:
    layer, _, part = name.rpartition(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}" if layer else f"{_TOP_NAMES[part]}.{kind}"


def _default_template(template: Any) -> str | None:
    """Some configs hold a list of named templates instead of one."""
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    """A special token is stored as text or as an object with `content`."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _adds_bos(path: Path, tokenizer_json: str, bos: str) -> bool:
    """Whether the tokenizer's own post-processor puts BOS before a text."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"{path} is not a tokenizer file that can be used: {error}.") from None
    return bool(bos) and tokenizer.encode("").ids[:1] == [tokenizer.token_to_id(bos)]
