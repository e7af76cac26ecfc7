"""How each matrix of a checkpoint is held: decided from its form alone, before anything is read.

    the publisher stored                      held as
    integers with integer zero points         the same, in blocks that MatMulNBits takes
    integers with a float minimum (GGUF)      the same, with a shift; embedding and head in 8 bits (weights/quantize.py)
    other GGUF blocks                         8 bits
    the codes of bitsandbytes                 the same
    a float model                             rounded: `bits` in blocks of `group`; embedding and head in 8 bits
    floats in a quantised model               float32; embedding and head as two 8-bit matrices that add up to 16 bits

`lossy` int4 rounds to 4 bits whatever has more. int8 rounds the codes of bitsandbytes to 8 bits, for machines where
they run slowly (edgekv/convert.py, `advice`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from edgekv.about import about
from edgekv.errors import InvalidOption, UnsupportedModel
from edgekv.weights import BlockWeight, Held, Matrix, WeightSource
from edgekv.weights.base import Float32, Form, Stored, form_of, matrix_names, operator_group
from edgekv.weights.quantize import quantize_blocks, split_blocks, without_shift

GROUPS = (32, 64, 128)
WHOLE = ("embed", "head")
"""The matrices that are never held in 4 bits unless the publisher did."""

TABLES = ("nf4", "fp4")
"""The forms whose codes stand for floats of a table."""

Lossy = Literal["", "int4", "int8"]


@dataclass(frozen=True)
class ConvertOptions:
    """How weights that cannot be kept as integers are held.

    Raises:
        InvalidOption: a value is out of range.
    """

    bits: int = about("Bits of rounded weights, 4 or 8 (float sources).", default=4)
    group: int = about("Columns that share a scale: 32, 64 or 128 (float sources).", default=32)
    lossy: Lossy = about(
        "int4 rounds what has more than 4 bits to 4; int8 rounds bitsandbytes' codes to 8, for speed. Both at a loss.",
        default="",
    )

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InvalidOption(f"Weights of {self.bits} bits cannot be made: choose 4 or 8.")
        if self.group not in GROUPS:
            raise InvalidOption(f"Blocks of {self.group} cannot be made: choose {', '.join(map(str, GROUPS))}.")
        if self.lossy not in get_args(Lossy):
            raise InvalidOption(f"Unknown lossy scheme {self.lossy!r}: choose int4 or int8.")


@dataclass(frozen=True)
class Rounding:
    """Squares of a matrix and of what rounding changed in it, summed over a sample of its rows; they add up."""

    weights: float = 0.0
    changes: float = 0.0

    @classmethod
    def between(cls, values: Float32, held: BlockWeight) -> Rounding:
        """Of a matrix and its rounding."""
        rows = np.arange(0, len(values), max(1, len(values) // 256))
        reference = values[rows]
        difference = reference - held.take_rows(rows).dequantize()
        return cls(float(np.square(reference, dtype=np.float64).sum()), float(np.square(difference).sum()))

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(self.weights + other.weights, self.changes + other.changes)

    @property
    def error(self) -> float:
        """Root mean square of the changes over that of the weights; 0: all was kept."""
        return float(np.sqrt(self.changes / max(self.weights, 1e-60)))


@dataclass(frozen=True)
class Holding:
    """The rules for one checkpoint. `quantised`: its publisher quantised it, and meant what is float to be so."""

    quantised: bool
    options: ConvertOptions

    def form(self, name: str, columns: int, form: Form) -> Form:
        """The form in which a matrix [N, `columns`] that is read in `form` will be held.

        Raises:
            UnsupportedModel: no block of the operators divides its columns.
        """
        lossy, whole = self.options.lossy, name in WHOLE
        if form.kind == "int" and (form.bits == 4 or whole or lossy != "int4"):
            bits = 8 if whole and form.shifted else form.bits  # GatherBlockQuantized adds nothing
            shifted = form.shifted and not whole
            return Form("int", bits, _operator_blocks(name, columns, form.group), shifted)
        if form.kind in TABLES and not lossy:
            return form
        if form.kind == "float" and self.quantised and lossy != "int4":
            return Form("int sum", 16, _blocks(name, columns, 32)) if whole else form
        bits = 8 if whole else {"int4": 4, "int8": 8}.get(lossy, self.options.bits)
        return Form("int", bits, _blocks(name, columns, 32 if whole else self.options.group))

    def forms(self, source: WeightSource) -> Iterator[tuple[str, Stored, Form]]:
        """Every matrix: its name, how it is stored, and how it will be held. Reads no weights."""
        for name in matrix_names(source.spec):
            stored = source.stored(name)
            yield name, stored, self.form(name, stored.shape[1], stored.form)

    def hold(self, name: str, weight: Matrix) -> tuple[Held, Rounding]:
        """A matrix, or some rows of one, as it is held, and what rounding did to it."""
        wanted = self.form(name, weight.shape[1], form_of(weight))
        if isinstance(weight, BlockWeight) and wanted.bits == weight.bits:
            return weight.to_group(wanted.group), Rounding()
        if isinstance(weight, BlockWeight) and weight.shift is not None and name in WHOLE:
            return without_shift(weight).to_group(wanted.group), Rounding()
        if wanted == form_of(weight):
            return weight, Rounding()
        values = weight if isinstance(weight, np.ndarray) else weight.dequantize()
        if wanted.kind == "int sum":
            return split_blocks(values, group=wanted.group), Rounding()
        held = quantize_blocks(values, bits=wanted.bits, group=wanted.group)
        return held, Rounding.between(values, held)


def held_size(matrices: Sequence[tuple[str, Stored, Form]], options: ConvertOptions) -> tuple[int, str]:
    """What matrices (`Holding.forms`) will take in the model's file, about, and how they will be held."""
    size = sum(form.bytes_of(stored.shape) for _, stored, form in matrices)
    return size, scheme_name({form for _, _, form in matrices}, options)


def scheme_name(forms: set[Form], options: ConvertOptions) -> str:
    """How everything is held: "int4/32, int8/32" are bits / block; "int8+8" is a sum of two."""
    return ", ".join(sorted(map(str, forms))) + (" requantised" if options.lossy else "")


def _blocks(name: str, columns: int, group: int) -> int:
    if columns % group:
        advice = ": use --group 32" if columns % GROUPS[0] == 0 else ", and no smaller ones are made"
        raise UnsupportedModel(f"{name} has {columns} columns, which blocks of {group} do not divide{advice}.")
    return group


def _operator_blocks(name: str, columns: int, group: int) -> int:
    """One group of 1536 columns becomes six equal blocks of 256."""
    size = operator_group(columns, group)
    if size is None:
        raise UnsupportedModel(
            f"{name} has {columns} columns in groups of {group}, which no block of 16 to 256 divides."
        )
    return size
