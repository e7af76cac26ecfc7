"""Perplexity along the text, one curve a cache (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekv.errors import DependencyMissing, InvalidOption
from edgekv.files import atomic_file

FORMATS = ("png", "svg", "pdf")


def check_plot(path: Path) -> None:
    """Make sure that a plot can be drawn into this file, before a long run.

    Raises:
        DependencyMissing: matplotlib is not installed. InvalidOption: the file's ending is no format that it draws.
    """
    if _format(path) not in FORMATS:
        raise InvalidOption(f"{path.name} is no kind of picture that is drawn: end it with .{', .'.join(FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DependencyMissing("A plot needs matplotlib: pip install 'edgekv[plots]'.") from None


def _format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"


def plot_blocks(path: Path, curves: Mapping[str, Sequence[float]], block: int, title: str) -> None:
    """Draw perplexity of each block of `block` tokens; the file's ending says in which of FORMATS.

    Raises:
        DependencyMissing, InvalidOption: see `check_plot`. StorageError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="token", ylabel="perplexity", title=title)
    for name, values in curves.items():
        axes.plot([(index + 0.5) * block for index in range(len(values))], values, label=name)
    axes.legend()
    axes.grid(alpha=0.3)
    with atomic_file(path) as part:
        figure.savefig(part, format=_format(path))
