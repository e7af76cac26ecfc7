"""What a lossy conversion costs, measured: its perplexity over that of the faithful one, on the same text.

The text is edgekv's own calibration prompts, so the figure says how much this model loses, not how good it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from edgekv.calibrate.corpus import seed_prompts
from edgekv.convert import convert
from edgekv.engines.base import Engine
from edgekv.evaluate import stream_loss
from edgekv.generate import Timeline
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import TOKENIZER, ConvertedModel
from edgekv.text.tokenizer import Tokenizer

CAPACITY = 512

OpenEngine = Callable[[ConvertedModel, KVSpec], Engine]


def measured_loss(source: Path, lossy: ConvertedModel, open_engine: OpenEngine) -> float:
    """Perplexity of `lossy` over that of `source` converted faithfully (into a folder that is removed again)."""
    with tempfile.TemporaryDirectory(dir=lossy.folder.parent, prefix=".faithful.") as folder:
        faithful = convert(source, Path(folder) / "model").model
        return _perplexity(lossy, open_engine) / _perplexity(faithful, open_engine)


def _perplexity(model: ConvertedModel, open_engine: OpenEngine) -> float:
    tokens = Tokenizer.from_file(model.folder / TOKENIZER).encode("\n\n".join(seed_prompts()))
    with closing(open_engine(model, KVSpec(CAPACITY, "float"))) as engine:
        return stream_loss(Timeline(engine), tokens).perplexity
