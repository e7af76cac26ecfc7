"""Opening torch engines on what a test has converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.convert import reopen
from edgekv.engines.base import Engine
from edgekv.engines.torch.engine import TorchEngine, TorchOptions, open_engine
from edgekv.engines.torch.loader import Published
from edgekv.generate import Timeline
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from helpers.checkpoints import VOCAB

OpenTorch = Callable[..., TorchEngine]


def open_torch_engine(
    model: ConvertedModel, kv: KVSpec, scales: KVScales | None = None, source: Path | None = None, **options: Any
) -> TorchEngine:
    """The torch engine on a converted model's own source. Tiny models are fastest on one thread."""
    path = source or Path(model.description.source)
    options = {"threads": 1 if model.spec.hidden_size < 512 else 2} | options
    published = Published(path, *reopen(model, path))
    return open_engine(published, model.fingerprint, kv, scales, TorchOptions(**options))


def random_ids(count: int, seed: int = 1) -> list[int]:
    """Ids of a tiny model's vocabulary."""
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def run(engine: Engine, ids: Sequence[int], pinned: int = 0, turns: Sequence[int] = ()) -> Any:
    """Logits after each token, through the product's own timeline."""
    timeline = Timeline(engine)
    timeline.rewind(ids, pinned)
    return timeline.append(list(ids), turns, all_logits=True)[0]
