"""A GGUF file of random weights: the geometry of a model whose weights cannot be had here, for its speed alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

Q4_0_BYTES, Q8_0_BYTES, BLOCK = 18, 34, 32
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model of the llama family."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    context: int = 8192

    def matrices(self) -> dict[str, tuple[int, int]]:
        """A layer's matrices by their GGUF names, each [outputs, inputs]."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_q": (query, self.hidden),
            "attn_k": (key, self.hidden),
            "attn_v": (key, self.hidden),
            "attn_output": (self.hidden, query),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }


GEOMETRIES = {"1.5b": Geometry(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_size=128)}
"""Of Qwen2.5-1.5B, with the vocabulary of the tokenizer that is borrowed."""


def write_random_gguf(target: Path, geometry: Geometry, tokenizer_of: Path) -> None:
    """Q4_0 matrices and a tied Q8_0 embedding, seeded, with the tokenizer of another GGUF file."""
    writer = gguf.GGUFWriter(target, "llama")
    vocabulary = _copy_tokenizer(writer, gguf.GGUFReader(tokenizer_of))
    _add_sizes(writer, geometry, vocabulary)
    rng = np.random.default_rng(0)
    ones = np.ones(geometry.hidden, np.float32)
    writer.add_tensor(
        "token_embd.weight", _q8_0(rng, vocabulary, geometry.hidden), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(geometry.layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, (outputs, inputs) in geometry.matrices().items():
            packed = _q4_0(rng, outputs, inputs)
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> int:
    """Returns the number of its tokens."""
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    return len(source.fields["tokenizer.ggml.tokens"].data)


def _add_sizes(writer: gguf.GGUFWriter, geometry: Geometry, vocabulary: int) -> None:
    """The metadata of the llama family."""
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(geometry.context)
    writer.add_block_count(geometry.layers)
    writer.add_embedding_length(geometry.hidden)
    writer.add_feed_forward_length(geometry.intermediate)
    writer.add_head_count(geometry.heads)
    writer.add_head_count_kv(geometry.kv_heads)
    writer.add_key_length(geometry.head_size)
    writer.add_value_length(geometry.head_size)
    writer.add_rope_dimension_count(geometry.head_size)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _q4_0(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Blocks of a float16 scale and 32 codes of 4 bits, 0 to 15, less 8: uint8 [outputs, bytes of a row]."""
    blocks = rng.integers(0, 256, (outputs, inputs // BLOCK, Q4_0_BYTES), np.uint8)
    blocks[..., :2] = _scale_bytes(WEIGHT_STD / 4.6)
    return blocks.reshape(outputs, -1)


def _q8_0(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Blocks of a float16 scale and 32 codes of 8 bits: uint8 [outputs, bytes of a row]."""
    blocks = rng.integers(0, 256, (outputs, inputs // BLOCK, Q8_0_BYTES), np.uint8)
    blocks[..., :2] = _scale_bytes(WEIGHT_STD / 74)
    return blocks.reshape(outputs, -1)


def _scale_bytes(scale: float) -> np.ndarray:
    return np.frombuffer(np.float16(scale).tobytes(), np.uint8)
