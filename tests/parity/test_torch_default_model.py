"""The torch engine on the default model, at length: what its quantised caches cost, and that it says what onnx says.

    python3 scripts/test.py -m slow -s tests/parity/test_torch_default_model.py

reads `EDGEKV_TEXT`, a UTF-8 file of English prose, or else the language reference that every Python carries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.prose import prose
from helpers.torch_engines import open_torch_engine

from edgekv.api import open_text
from edgekv.calibrate import CalibrateOptions, calibrate
from edgekv.engines.onnx.engine import open_engine
from edgekv.engines.onnx.options import OnnxOptions
from edgekv.evaluate.losses import token_losses
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.model import catalog
from edgekv.model.converted import ConvertedModel
from edgekv.prepare import find_scales, published_source
from edgekv.text.template import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

INT8_TOLERANCE = 2e-2  # of a position's logits, as in test_torch_engine.py
BOUNDS: dict[KVDtype, float] = {"int8": 1.005, "fp8": 1.015}
"""Perplexity over that of a float cache."""
TOKENS, SEGMENT = 4096, 1024


@pytest.fixture(scope="module")
def scales(default_model: ConvertedModel) -> Callable[[KVDtype], KVScales]:
    """Those that come with the model, or the product's own calibration."""
    tokenizer, chat_format = open_text(default_model)

    def measured(dtype: KVDtype) -> KVScales:
        if dtype == "int8":
            found = find_scales(default_model, dtype, "channel")
            assert found is not None
            return found
        options = CalibrateOptions(dtype=dtype)
        return calibrate(
            default_model, tokenizer, chat_format, lambda kv, s: onnx(default_model, kv, s), options
        ).scales

    return cache(measured)


def onnx(model: ConvertedModel, kv: KVSpec, scales: KVScales | None, level: int = 4) -> Any:
    return open_engine(model, kv, scales, OnnxOptions(threads=2, accuracy_level=level))


def torch_engine(model: ConvertedModel, kv: KVSpec, scales: KVScales | None) -> Any:
    source = published_source(model, catalog.home())
    return open_torch_engine(model, kv, scales, source)


def greedy(engine: Any, ids: list[int], count: int) -> tuple[list[int], list[Any]]:
    """Tokens, and the logits that each was chosen from."""
    logits = [engine.forward(ids)]
    said = [int(np.argmax(logits[0]))]
    while len(said) < count:
        logits.append(engine.forward(said[-1:]))
        said.append(int(np.argmax(logits[-1])))
    return said, logits


@pytest.mark.parametrize("question", ["What is the capital of France?", "Why is the sky blue?", "Name three colours."])
def test_int8_says_the_same(
    default_model: ConvertedModel, scales: Callable[[KVDtype], KVScales], question: str
) -> None:
    """64 tokens greedily as the onnx engine at level 1, or a first difference at which the two choices are nearer one
    another than the INT8 tolerance makes two logits: three standard deviations of their difference."""
    tokenizer, chat_format = open_text(default_model)
    assert chat_format is not None
    text = chat_format.prompt([Message(role="user", content=question)]).text
    ids = list(tokenizer.encode_guarded(text).ids)
    kv, own = KVSpec(256, "int8"), scales("int8")
    found, wanted = [], []
    for made, opened in (
        (found, torch_engine(default_model, kv, own)),
        (wanted, onnx(default_model, kv, own, level=1)),
    ):
        with closing(opened):
            made += greedy(opened, ids, 64)
    first = next((i for i, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)) if a != b), None)
    if first is None:
        print(f"\n{question} 64 tokens, the same")
        return
    logits = wanted[1][first]
    gap = float(logits[wanted[0][first]] - logits[found[0][first]])
    bound = 3 * 2**0.5 * INT8_TOLERANCE * float(np.sqrt(np.mean(logits**2)))
    print(f"\n{question} the same until token {first}, whose choices are {gap:.4f} apart (bound {bound:.2f})")
    assert gap < bound


@pytest.mark.parametrize("dtype", BOUNDS)
def test_perplexity_is_that_of_a_float_cache(
    default_model: ConvertedModel, scales: Callable[[KVDtype], KVScales], reference: Any, dtype: KVDtype
) -> None:
    """INT8 within 0.5 %, FP8 within 1.5 %, over the same segments."""
    found = all_losses(default_model, KVSpec(SEGMENT, dtype), scales(dtype))
    differences = found - reference
    ratio = np.exp(differences.mean())
    error = ratio * differences.std() / np.sqrt(len(differences))
    whole = np.exp(reference.mean())
    print(f"\n{dtype}: {len(found)} tokens, {ratio:.4f} +- {error:.4f} of a float cache's {whole:.3f}")
    assert ratio < BOUNDS[dtype]


@pytest.fixture(scope="module")
def reference(default_model: ConvertedModel) -> Any:
    """Losses with a float cache."""
    return all_losses(default_model, KVSpec(SEGMENT, "float"), None)


def text_ids(model: ConvertedModel) -> list[int]:
    path = os.environ.get("EDGEKV_TEXT")
    text = Path(path).read_text("utf-8") if path else prose(1 << 20)
    tokens = open_text(model)[0].encode(text[: 16 * TOKENS])[:TOKENS]
    assert len(tokens) == TOKENS
    return tokens


def all_losses(model: ConvertedModel, kv: KVSpec, scales: KVScales | None) -> Any:
    return np.concatenate(list(losses(model, kv, scales, text_ids(model))))


def losses(model: ConvertedModel, kv: KVSpec, scales: KVScales | None, ids: list[int]) -> Iterator[Any]:
    """Losses of each segment, read into an empty cache."""
    with closing(torch_engine(model, kv, scales)) as engine:
        for start in range(0, len(ids) - 1, kv.capacity):
            part = ids[start : start + kv.capacity]
            engine.reset()
            for at in range(0, len(part) - 1, 256):
                chunk = part[at : at + 256]
                following = part[at + 1 : at + 257]
                logits = engine.forward(chunk, all_logits=True)[: len(following)]
                yield token_losses(logits, following)
