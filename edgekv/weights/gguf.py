"""GGUF files (llama.cpp's format, read through the `gguf` package) as a WeightSource.

Block types with integer zero points keep their integers: Q4_0 and Q3_K in 4 bits, Q5_0 in 5, Q6_K in 6, Q8_0 in 8, and
so do IQ4_NL and IQ4_XS, whose 16 levels are integers of 8 bits. Types with a float minimum (Q4_1, Q5_1, Q4_K, Q5_K)
keep it as a shift. Every other type is dequantised by the `gguf` package and rounded to 8 bits in blocks of 32.

The trap: some architectures store the rows of Q and K interleaved for llama.cpp's RoPE (gguf_metadata.py); they are put
back into the half-split order here. Layouts are those of ggml's quantisation reference (ggml-quants).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import BadCheckpoint, UnsupportedModel
from edgekv.model.recommended import from_gguf
from edgekv.weights.base import (
    BlockWeight,
    Codes,
    Float32,
    Form,
    Matrix,
    Order,
    Stored,
    TokenizerFiles,
    join_rows,
    matrix_names,
    row_blocks,
    take_rows,
)
from edgekv.weights.gguf_metadata import INTERLEAVED_QK, Metadata, spec_from_metadata
from edgekv.weights.names import layer_parts, packed_rows, packed_with, shape, turning_first
from edgekv.weights.quantize import affine, quantize_blocks

_FLOATS = ("F32", "F16", "BF16")

_NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "post_attn_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "post_ffn_norm": "post_ffw_norm",
}  # fmt: skip
_PACKED_NAMES = {"q": "attn_qkv", "gate": "ffn_up"}  # by the first of the packed
_TOP_NAMES = {"embed": "token_embd", "norm": "output_norm", "head": "output"}


class GGUFSource:
    """A GGUF file, one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_types()
        self._metadata = Metadata(path, self._reader.fields)
        self._refuse_parts()
        self.spec = spec_from_metadata(self._metadata, self._tensors, _to_float)
        self.sampling = from_gguf(lambda key: self._metadata.field(key, float, None))
        self._check_shapes()

    @property
    def files(self) -> list[str]:
        """The one file."""
        return [str(self.path)]

    @property
    def scheme(self) -> str:
        """The tensor types in it, most frequent first."""
        kinds = Counter(tensor.tensor_type.name for tensor in self._reader.tensors if len(tensor.shape) > 1)
        return "GGUF " + ", ".join(kind for kind, _ in kinds.most_common())

    @property
    def quantised(self) -> bool:
        """Whether any matrix is stored in blocks."""
        return any(len(tensor.shape) > 1 and tensor.tensor_type.name not in _FLOATS for tensor in self._reader.tensors)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """See WeightSource."""
        kinds = Counter(self.stored(name).label for name in matrix_names(self.spec))
        counts = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
        return [("architecture", self._metadata.architecture), ("matrices", counts)]

    def stored(self, name: str) -> Stored:
        """See WeightSource."""
        rows, columns = shape(self.spec, name)
        kind = self._tensor(self._place(name)[0]).tensor_type.name
        form = Form("float") if kind in _FLOATS else _FORMS.get(kind, Form("int", 8, 32))
        return Stored(kind, (rows, columns), form, exact=kind in (*_FLOATS, *_FORMS))

    def matrix(self, name: str) -> Matrix:
        """A weight [out, in] as stored, or as close as integers can hold it."""
        weight = join_rows(self._row_blocks(name))
        assert isinstance(weight, BlockWeight | np.ndarray)
        for order in (self._turned(name), turning_first(self.spec, name)):
            weight = weight if order is None else take_rows(weight, order)
        return weight

    def blocks(self, name: str) -> Iterator[Matrix]:
        """See WeightSource. Q and K, whose rows are put in another order, come whole."""
        return iter([self.matrix(name)]) if name.endswith((".q", ".k")) else self._row_blocks(name)

    def _row_blocks(self, name: str) -> Iterator[Matrix]:
        """The rows as they lie in the file. Each block is mapped for itself: the library's one map of the whole file
        would keep all that was read of it resident."""
        place, chosen = self._place(name)
        tensor = self._tensor(place)
        stored, columns = (int(size) for size in reversed(tensor.shape))
        rows, row_bytes = chosen or range(stored), tensor.n_bytes // stored
        for part in row_blocks((len(rows), columns)):
            size = (part.stop - part.start, row_bytes)
            start = tensor.data_offset + (rows.start + part.start) * row_bytes
            data = np.memmap(self.path, np.uint8, "r", start, size)
            weight = _read_matrix(tensor, data, columns)
            for factors in (weight.scales, weight.shifts()) if isinstance(weight, BlockWeight) else (weight,):
                self._require_finite(tensor, factors)
            yield weight

    def vector(self, name: str) -> Float32:
        """A norm's weight or a bias, in float32."""
        base = name.removesuffix(".bias")
        tensor = self._tensor(self._place(base)[0], "weight" if name == base else "bias")
        values = _to_float(tensor)
        self._require_finite(tensor, values)
        order = self._turned(base)
        return values if order is None else np.asarray(values[order])

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer and chat template stored in the metadata."""
        from edgekv.text.gguf_tokenizer import GGUFVocab, build_tokenizer

        metadata, tokens = self._metadata, self._metadata.tokens
        bos, eos = metadata.token_id("bos"), metadata.token_id("eos")
        kind = self._tokenizer_model
        vocab = GGUFVocab(
            model=kind,
            pre=self._tokenizer_pre,
            tokens=tokens,
            types=metadata.token_types,
            merges=metadata.items("tokenizer.ggml.merges", str, []),
            scores=metadata.items("tokenizer.ggml.scores", float, []),
            add_space_prefix=metadata.field("tokenizer.ggml.add_space_prefix", bool, None),
            special_ids=metadata.special_ids,
            marks_strip=kind == "llama" and self.spec.family == "phi3",
        )
        return TokenizerFiles(
            tokenizer_json=str(build_tokenizer(vocab).to_str()),
            chat_template=metadata.chat_template,
            bos_token="" if bos is None else tokens[bos],
            eos_token="" if eos is None else tokens[eos],
            add_bos=bos is not None and metadata.field("tokenizer.ggml.add_bos_token", bool, kind == "llama"),
        )

    @property
    def missing_tokenizer(self) -> str:
        """See WeightSource. A GGUF file always has a tokenizer, but not always of a kind that is known."""
        from edgekv.text.gguf_tokenizer import unknown_kind

        reason = unknown_kind(self._tokenizer_model, self._tokenizer_pre)
        return f"{self.path.name} {reason}" if reason else ""

    @property
    def _tokenizer_model(self) -> str:
        return str(self._metadata.field("tokenizer.ggml.model", str))

    @property
    def _tokenizer_pre(self) -> str:
        return str(self._metadata.field("tokenizer.ggml.pre", str, ""))

    @property
    def has_template(self) -> bool:
        """See WeightSource."""
        return "tokenizer.chat_template" in self._reader.fields

    def _turned(self, name: str) -> Order | None:
        """The rows of Q or K in the half-split order, where the file has neighbouring channels as pairs."""
        if self.spec.family not in INTERLEAVED_QK or not name.endswith((".q", ".k")):
            return None
        rows = np.arange(shape(self.spec, name)[0]).reshape(-1, self.spec.head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    def _place(self, name: str) -> tuple[str, range | None]:
        """The tensor that holds a matrix or norm, and which of its rows; None: all."""
        layer, _, part = name.rpartition(".")
        if not layer:
            return _TOP_NAMES[part], None
        if self.spec.family == "phi3" and packed_with(part):
            return f"blk.{layer}.{_PACKED_NAMES[packed_with(part)[0]]}", packed_rows(self.spec, part)[1]
        return f"blk.{layer}.{_NAMES[part]}", None

    def _refuse_parts(self) -> None:
        count = self._metadata.field("split.count", int, 1)
        if count > 1:
            part = self._metadata.field("split.no", int, 0) + 1
            first = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-00001\1", str(self.path))
            raise UnsupportedModel(
                f"{self.path.name} is part {part} of {count} of one model: get all of them and join them with "
                f"`llama-gguf-split --merge {first} OUT.gguf`."
            )

    def _check_types(self) -> None:
        """The library knows more types than it can dequantise: it is asked, for one block of zeros of each type."""
        import gguf

        for kind, tensor in {tensor.tensor_type: tensor for tensor in self._reader.tensors}.items():
            try:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise UnsupportedModel(
                    f"{self.path.name}: {tensor.name} is stored as {kind.name}, which edgekv does not read."
                ) from None

    def _check_shapes(self) -> None:
        spec = self.spec
        if spec.num_layers > len(self._tensors):
            raise BadCheckpoint(
                f"{self.path.name} has {len(self._tensors)} tensors for {spec.num_layers} layers: it is incomplete."
            )
        names = [f"{layer}.{part}" for layer in range(spec.num_layers) for part in layer_parts(spec)]
        for name in ["embed", "norm", *names, *["head"] * (not spec.tied_embeddings)]:
            place, rows = self._place(name)
            wanted = shape(spec, name)
            if rows is not None:
                wanted = (packed_rows(spec, name.rpartition(".")[2])[0], *wanted[1:])
            self._check_shape(place, "weight", wanted)
        biased = [f"{layer}.{part}" for layer in range(spec.num_layers) for part in spec.biased]
        for name in biased:
            self._check_shape(self._place(name)[0], "bias", shape(spec, f"{name}.bias"))
        known = {f"{self._place(name)[0]}.weight" for name in names} | {
            f"{self._place(name)[0]}.bias" for name in biased
        }
        unknown = sorted(name for name in self._tensors if name.startswith("blk.") and name not in known)
        if unknown:
            raise UnsupportedModel(f"{self.path.name} has a tensor {unknown[0]}, which edgekv does not run.")

    def _check_shape(self, name: str, suffix: str, shape: tuple[int, ...]) -> None:
        found = tuple(int(size) for size in reversed(self._tensor(name, suffix).shape))
        if found != shape:
            raise BadCheckpoint(
                f"{self.path.name}: {name}.{suffix} is {list(found)}, but the metadata says {list(shape)}."
            )

    def _require_finite(self, tensor: Any, factors: Float32) -> None:
        if not np.isfinite(factors).all():
            raise BadCheckpoint(
                f"{self.path.name}: {tensor.name} holds numbers that are not finite: download the model again."
            )

    def _tensor(self, name: str, suffix: str = "weight") -> Any:
        try:
            return self._tensors[f"{name}.{suffix}"]
        except KeyError:
            raise BadCheckpoint(f"{self.path.name} has no tensor {name}.{suffix}: the file is incomplete.") from None


def _open(path: Path) -> Any:
    from edgekv.weights.gguf_reader import WholeFileReader

    try:
        reader = WholeFileReader(path)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path.name}: {error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, UnicodeDecodeError, TypeError) as error:
        size = path.stat().st_size
        raise BadCheckpoint(
            f"{path} ({size:,} bytes) is not a whole GGUF file ({str(error)[:80]}): download it again."
        ) from None
    if reader.byte_order == "S":
        raise UnsupportedModel(
            f"{path.name} has its bytes in the order of another kind of machine: get the little-endian file."
        )
    return reader


def _to_float(tensor: Any, data: Codes | None = None) -> Float32:
    """A tensor in float32; `data`: only these bytes of it."""
    import gguf

    values = gguf.quants.dequantize(tensor.data if data is None else data, tensor.tensor_type)
    return np.asarray(values, dtype=np.float32)


def _read_matrix(tensor: Any, data: Codes, columns: int) -> BlockWeight | Float32:
    """Some rows of a matrix, from their bytes."""
    kind = tensor.tensor_type.name
    if kind in _READERS:
        return _READERS[kind](data, columns)
    if kind in _FLOATS:
        return _to_float(tensor, data)
    return quantize_blocks(_to_float(tensor, data), bits=8, group=32)


def _half(raw: Codes) -> Float32:
    return np.asarray(raw.copy().view(np.float16).astype(np.float32)[..., 0])


def _nibbles(raw: Codes) -> Codes:
    """[..., n] bytes -> [..., 2 n] codes: all low nibbles first, then all high ones."""
    return np.concatenate([raw & 0xF, raw >> 4], axis=-1)


def _fifth_bits(raw: Codes) -> Codes:
    """4 bytes -> the 32 high bits of a Q5 block, each worth 16."""
    return (np.unpackbits(raw, axis=-1, bitorder="little") << 4).astype(np.uint8)


def _blocks(data: Codes, size: int) -> Codes:
    return data.reshape(len(data), -1, size)  # [N, blocks, bytes]


def _q4_0(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 18)  # fp16 scale, 16 bytes of nibbles
    codes = _nibbles(blocks[..., 2:]).reshape(len(data), columns)
    return BlockWeight(codes, _half(blocks[..., :2]), None, 4, 32)


def _q4_1(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 20)  # fp16 scale, fp16 minimum, 16 bytes of nibbles
    codes = _nibbles(blocks[..., 4:]).reshape(len(data), columns)
    return affine(codes, _half(blocks[..., :2]), _half(blocks[..., 2:4]), bits=4, group=32)


def _q5_0(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 22)  # fp16 scale, 32 high bits, 16 bytes of nibbles; code - 16
    codes = _nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6])
    return BlockWeight(codes.reshape(len(data), columns), _half(blocks[..., :2]), None, 5, 32)


def _q5_1(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 24)  # fp16 scale, fp16 minimum, 32 high bits, 16 bytes of nibbles
    codes = (_nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])).reshape(len(data), columns)
    return affine(codes, _half(blocks[..., :2]), _half(blocks[..., 2:4]), bits=5, group=32)


def _q8_0(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 34)  # fp16 scale, 32 signed bytes
    codes = (blocks[..., 2:] + np.uint8(128)).reshape(len(data), columns)
    return BlockWeight(codes, _half(blocks[..., :2]), None, 8, 32)


def _k_scales(packed: Codes) -> tuple[Float32, Float32]:
    """The 12 bytes of a Q4_K or Q5_K super-block -> eight 6-bit scales and eight 6-bit minima."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 144)  # fp16 scale of scales, fp16 of minima, 12 bytes of those, 128 of nibbles
    scales, minima = _k_scales(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))  # [N, super, 4, 64]
    return _k_affine(blocks, scales, minima, codes.reshape(len(data), columns), bits=4)


def _q5_k(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 176)  # as Q4_K, with 32 bytes of high bits before the nibbles
    scales, minima = _k_scales(blocks[..., 4:16])
    bits = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [N, super, 8, 32]
    codes = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    return _k_affine(blocks, scales, minima, (codes + (bits << 4)).reshape(len(data), columns), bits=5)


def _k_affine(blocks: Codes, scales: Float32, minima: Float32, codes: Codes, *, bits: int) -> BlockWeight:
    step = (scales * _half(blocks[..., :2])[..., None]).reshape(len(codes), -1)
    minimum = (-minima * _half(blocks[..., 2:4])[..., None]).reshape(len(codes), -1)
    return affine(codes, step, minimum, bits=bits, group=32)


def _q6_k(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 210)  # 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, fp16 scale; code - 32
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low + (high << 4)).reshape(len(data), columns).astype(np.uint8)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _half(blocks[..., 208:210])[..., None]
    return BlockWeight(codes, scales.reshape(len(data), -1), None, 6, 16)


def _q3_k(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 110)  # 32 bytes of high bits, 64 of low bit pairs, 12 of 6-bit scales, fp16 scale; code - 4
    pairs = blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32)
    low = ((pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(*blocks.shape[:2], 8, 32)
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = (low + (high << 2) + 4).reshape(len(data), columns).astype(np.uint8)
    fours = blocks[..., 96:104]
    twos = (blocks[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # [N, super, 4, 4]
    scales = np.asarray(_nibbles(fours) | (twos.reshape(*blocks.shape[:2], 16) << np.uint8(4)), np.uint8)
    return _scaled(codes, scales, _half(blocks[..., 108:110]), bits=4, group=16)


_IQ4_LEVELS = np.array((1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241), np.uint8)
"""The levels of IQ4_NL and IQ4_XS, plus 128."""


def _iq4_nl(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 18)  # fp16 scale, 16 bytes of nibbles
    codes = _IQ4_LEVELS[_nibbles(blocks[..., 2:])].reshape(len(data), columns)
    return BlockWeight(codes, _half(blocks[..., :2]), None, 8, 32)


def _iq4_xs(data: Codes, columns: int) -> BlockWeight:
    blocks = _blocks(data, 136)  # fp16 scale, 6-bit scales as 16 bits of high pairs and 4 bytes, 128 bytes of nibbles
    codes = _IQ4_LEVELS[_nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))].reshape(len(data), columns)
    places = np.array([0, 2, 4, 6], np.uint8)
    high = ((blocks[..., 2:4, None] >> places) & 3).reshape(*blocks.shape[:2], 8)
    low = np.stack([blocks[..., 4:8] & 0xF, blocks[..., 4:8] >> 4], -1).reshape(*blocks.shape[:2], 8)
    scales = np.asarray(low | (high << np.uint8(4)), np.uint8)
    return _scaled(codes, scales, _half(blocks[..., :2]), bits=8, group=32)


def _scaled(codes: Codes, scales: Codes, factor: Float32, *, bits: int, group: int) -> BlockWeight:
    """Blocks whose scales are 6-bit integers around 32, times a factor of the super-block."""
    step = factor[..., None] * (scales.astype(np.float32) - 32)
    return BlockWeight(codes, step.reshape(len(codes), -1), None, bits, group)


_FORMS = {
    "Q3_K": Form("int", 4, 16), "IQ4_NL": Form("int", 8, 32), "IQ4_XS": Form("int", 8, 32),
    "Q4_0": Form("int", 4, 32), "Q5_0": Form("int", 5, 32), "Q8_0": Form("int", 8, 32), "Q6_K": Form("int", 6, 16),
    "Q4_1": Form("int", 4, 32, shifted=True), "Q4_K": Form("int", 4, 32, shifted=True),
    "Q5_1": Form("int", 5, 32, shifted=True), "Q5_K": Form("int", 5, 32, shifted=True),
}  # fmt: skip
"""The form of the types whose integers are kept; all others are held in 8 bits in blocks of 32."""

_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
