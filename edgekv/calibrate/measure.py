"""The losses of text through a cache, as a calibration compares them: both engines, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import Engine
from edgekv.evaluate import stream_loss
from edgekv.generate import Timeline


def losses(
    engine: Engine, sequences: Sequence[Sequence[int]], progress: Callable[[int], None] = lambda done: None
) -> npt.NDArray[np.float64]:
    """The loss of every token after the first of each sequence, each from an empty cache; `progress` counts tokens."""
    timeline, parts, done = Timeline(engine), [], 0
    for sequence in sequences:
        parts.append(stream_loss(timeline, sequence).losses)
        done += len(sequence)
        progress(done)
    return np.concatenate(parts)
