"""Published weights -> BlockWeight (integer codes, scales, zero points) or Bnb4Weight, one file a format.

`open_source(path)` looks at a path and returns the reader for it; readers hand out one tensor at a time.
"""

from __future__ import annotations

from pathlib import Path

from edgekv.errors import ModelNotFound, UnsupportedModel
from edgekv.weights.base import BlockWeight, Bnb4Weight, Held, Matrix, SplitWeight, WeightSource

__all__ = ["BlockWeight", "Bnb4Weight", "Held", "Matrix", "SplitWeight", "WeightSource", "open_source"]


def open_source(path: Path) -> WeightSource:
    """The reader for a GGUF file or a folder of safetensors.

    Raises:
        ModelNotFound: there is nothing at `path`, or nothing edgekv can read.
    """
    if path.is_file() and _is_gguf(path):
        from edgekv.weights.gguf import GGUFSource

        return GGUFSource(path)
    if path.is_dir():
        ggufs = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
        if (path / "config.json").exists() and any(path.glob("*.safetensors")):
            from edgekv.weights.safetensors import SafetensorsSource

            return SafetensorsSource(path)
        if len(ggufs) == 1:
            return open_source(ggufs[0])
        if ggufs:
            raise ModelNotFound(f"{path} holds {len(ggufs)} GGUF files: name one of them, e.g. {ggufs[0]}.")
        if any(path.glob("*.bin")) or any(path.glob("*.pt")):
            raise UnsupportedModel(
                f"{path} holds pickled weights, which edgekv never loads: get the safetensors files."
            )
        if any(path.glob("*.onnx")) or any(path.glob("onnx/*.onnx")):
            raise UnsupportedModel(f"{path} holds an ONNX graph, which is run as it is: `edgekv chat {path}`.")
    what = "does not exist" if not path.exists() else "holds neither a .gguf file nor config.json with .safetensors"
    raise ModelNotFound(
        f"{path} {what}: give a GGUF file, a folder of safetensors, or a name that `edgekv pull` knows."
    )


def _is_gguf(path: Path) -> bool:
    """By its name, or by its first bytes: Ollama's files have no suffix."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
