"""scripts/fidelity.py: the parts that need neither a real model nor a peer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import fake_spec
from helpers.scripts import load_script

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    return load_script("fidelity")


def test_blocks_round_within_half_a_step_of_their_own(script: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 5, 64)).astype(np.float32) * np.linspace(
        1, 50, 64, dtype=np.float32
    )
    steps = np.abs(rows).reshape(2, 5, 2, 32).max(-1, keepdims=True) / 127
    error = np.abs(script.in_blocks(rows, 127) - rows).reshape(2, 5, 2, 32)
    assert (error <= steps * 0.501).all()
    assert error.max() > 0.4 * steps.max()


def test_first_rows_stay_exact(script: Any) -> None:
    cache = script.exact_first(lambda part, layer, rows: rows * 0, count=2)
    assert cache(0, 0, np.ones((1, 4, 2)))[0, :, 0].tolist() == [1, 1, 0, 0]


def test_engines_that_only_step_are_compared(script: Any) -> None:
    """The second is the first with its logits blurred; both are told where a segment begins."""
    starts: list[int] = []

    def run(tokens: Sequence[int], past: int, factor: float = 1.0) -> Any:
        starts.append(past)
        return np.stack([np.random.default_rng(t).normal(size=64) * factor for t in tokens]).astype(np.float32)

    engines = [script.Stepper(fake_spec(), run), script.Stepper(fake_spec(), lambda t, p: run(t, p, 0.9))]
    ids = np.random.default_rng(1).integers(3, 60, script.SEGMENT + 100).tolist()
    reference, other = script.compare(["f16", "blurred"], engines, ids, ())
    assert starts.count(0) == 4
    assert reference["tokens"] == other["tokens"] == len(ids) - 2
    assert reference["ratio"] is None
    assert 0 < other["kl"] < 0.1
    assert other["top1"] == 1


def test_the_text_of_a_folder_of_html(script: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.html").write_text("<p>two &amp; three</p>")
    (tmp_path / "in" / "a.html").write_text("<head><title>x</title></head><script>y()</script><b>one</b>")
    assert script.plain_text(tmp_path / "in", tmp_path).read_text().split() == ["one", "two", "&", "three"]


def test_the_report_is_made_of_what_was_measured(script: Any, tmp_path: Path) -> None:
    lane = {"name": "int8", "tokens": 9, "perplexity": 2.0, "ratio": 1.01, "ratio_error": 0.1, "kl": 0.002}
    lanes = [{"name": "float", "tokens": 9, "perplexity": 1.98, "ratio": None}, lane | {"kl_error": 0.001, "top1": 0.5}]
    (tmp_path / "granularity.json").write_text(json.dumps({"lanes": lanes}))
    text = script.report(tmp_path)
    assert "### granularity, 9 tokens" in text
    assert "| int8 | 2.000 | 1.0100 ± 0.1000 | 2.00 ± 1.00 | 50.00% |" in text


def test_a_simulated_cache_goes_on_behind_what_it_holds(script: Any) -> None:
    """Two pieces through transformers' own cache give what the whole text gives, in a form of the call that stays (a
    deprecated one is an error in the tests); a cache that holds nothing of keys and values gives something else."""
    import torch
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(DATA / "llama-fp16", dtype=torch.float32)
    ids = list(range(5, 25))
    with torch.no_grad():
        wanted = hf(torch.tensor([ids])).logits[0].numpy()
        plain = script.simulated_stepper(hf, fake_spec(), None)
        pieces = np.concatenate([plain.forward(ids[:12]), plain.forward(ids[12:])])
        empty = script.simulated_stepper(hf, fake_spec(), lambda part, layer, rows: rows * 0).forward(ids)
    np.testing.assert_allclose(pieces, wanted, atol=1e-5)
    assert np.abs(empty - wanted).max() > 0.01
