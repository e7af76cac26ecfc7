"""A run that was stopped: its numbers and its caches in one file, written atomically, so that it can go on.

What a cache holds after evictions cannot be made again from the tokens it holds (kept keys have seen evicted ones), so
the rows are saved too. The file is a NumPy archive without pickles. It carries a key made of everything that decides
the numbers; another run's file is refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from edgekv.engines.base import EngineState, PinnedAngles
from edgekv.errors import InvalidOption
from edgekv.evaluate.compare import Comparison, Lane
from edgekv.files import atomic_file

Arrays = dict[str, npt.NDArray[Any]]


def run_key(comparison: Comparison, fingerprint: str) -> str:
    """A hash of the model, the text and every lane."""
    text = comparison.text
    told = [fingerprint, text.segment, list(text.first)]
    told += [[lane.name, repr(lane.engine.kv)] for lane in comparison.everything()]
    digest = hashlib.sha256(json.dumps(told).encode() + np.asarray(text.ids, np.int64).tobytes())
    for lane in comparison.everything():
        if lane.scales is not None:
            digest.update(lane.scales.k.tobytes() + lane.scales.v.tobytes())
    return digest.hexdigest()


def save(path: Path, comparison: Comparison, key: str) -> None:
    """Write the state of a run.

    Raises:
        StorageError: the disk will not have it; what was at `path` is as it was.
    """
    arrays: Arrays = {"key": np.frombuffer(bytes.fromhex(key), np.uint8), "done": np.asarray(comparison.done)}
    for index, lane in enumerate(comparison.everything()):
        arrays |= {f"{index}.{name}": array for name, array in _lane_arrays(lane).items()}
    with atomic_file(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load(path: Path, comparison: Comparison, key: str) -> None:
    """Put a run where it was stopped.

    Raises:
        InvalidOption: the file is another run's, or damaged.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays: Arrays = dict(file)
        found = arrays["key"].tobytes().hex()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise InvalidOption(f"{path} is not a whole checkpoint ({error}): delete it to begin anew.") from None
    if found != key:
        raise InvalidOption(
            f"{path} is of a run with another model, text or settings: repeat that run's command to go on with it, or "
            "delete the file to begin anew."
        )
    for index, lane in enumerate(comparison.everything()):
        start = f"{index}."
        _restore(lane, {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)})
    comparison.done = int(arrays["done"])


def _lane_arrays(lane: Lane) -> Arrays:
    state = lane.engine.save()
    arrays: Arrays = {
        "losses": np.concatenate([*lane.losses, np.zeros(0)]),
        "kl": np.concatenate([*lane.kl, np.zeros(0)]),
        "agree": np.concatenate([*lane.agree, np.zeros(0, np.bool_)]),
        "keys": np.stack(state.keys),
        "values": np.stack(state.values),
        "tokens": np.asarray(state.tokens, np.int64),
        "counts": np.asarray([state.evicted, state.pinned, lane.evicted, state.pinned_angles == "own"], np.int64),
    }
    return arrays if lane.meter is None else arrays | {"errors": lane.meter.sums}


def _restore(lane: Lane, arrays: Arrays) -> None:
    lane.losses, lane.kl, lane.agree = [arrays["losses"]], [arrays["kl"]], [arrays["agree"]]
    evicted, pinned, lane.evicted, own = (int(x) for x in arrays["counts"])
    tokens: tuple[int, ...] = tuple(arrays["tokens"].tolist())
    angles: PinnedAngles = "own" if own else "moved"
    lane.engine.load(EngineState(tuple(arrays["keys"]), tuple(arrays["values"]), tokens, evicted, pinned, angles))
    if lane.meter is not None:
        lane.meter.sums[:] = arrays["errors"]
