"""The default model in GPTQ, AWQ and NF4, quantised by the public tools: it knows the capital of France, and its
perplexity on 4,096 tokens is that of the dequantised weights in transformers.

    EDGEKV_GPTQMODEL  a Python that has gptqmodel 7.7.0; without it one is made (its torch takes several GB)
                      (bitsandbytes 0.50.2 has to be in the environment of the tests)
    EDGEKV_TEXT       a text for the perplexity; without it, the language reference that every Python carries

The float checkpoint is the default model's GGUF file as transformers dequantises it. The quantiser calibrates on other
chapters of that reference. `-s` prints the figures.
"""

from __future__ import annotations

import math
import os
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import open_test_engine
from helpers.prose import TOPICS, default_config, default_source, prose
from helpers.published import dequantised_checkpoint
from helpers.reference import transformers_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DynamicCache

from edgekv.kv.spec import KVSpec
from edgekv.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

TOKENS = 4096
CHUNK = 512
Quantise = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory, default_model: Any) -> Path:
    """The default model as an ordinary float16 checkpoint."""
    folder, name = default_source()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = default_config()
    config.architectures, config.dtype = [type(model).__name__], "float16"
    vars(config).pop("quantization_config", None)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    out = tmp_path_factory.mktemp("float") / "model"
    plain.half().save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def gptqmodel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has gptqmodel."""
    if known := os.environ.get("EDGEKV_GPTQMODEL"):
        return known
    folder = tmp_path_factory.mktemp("gptqmodel")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    for packages in (["torch", "setuptools", "wheel"], ["gptqmodel==7.7.0"]):
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-build-isolation", *packages], check=True)
    return python


def with_gptqmodel(python: str, method: str, source: Path, out: Path) -> None:
    """GPTQ with act-order or AWQ, groups of 64."""
    text = out.parent / "calibration.txt"
    topics = pydoc_data.topics.topics
    text.write_text("\n\n".join(topics[name] for name in sorted(topics) if name not in TOPICS), "utf-8")
    program = str(Path(__file__).parents[1] / "helpers" / "run_gptqmodel.py")
    environment = os.environ | {"GPTQMODEL_CPU_WORKERS": "2"}
    subprocess.run(
        [python, program, str(source), str(out), method, str(text)], check=True, env=environment, cwd=out.parent
    )


def with_bitsandbytes(source: Path, out: Path) -> None:
    """NF4 with double quantisation."""
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes==0.50.2 into the tests' environment")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype=torch.float32, device_map="cpu")
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def text_ids(folder: Path) -> list[int]:
    """The first tokens of the text."""
    path = os.environ.get("EDGEKV_TEXT")
    text = Path(path).read_text("utf-8")[: 8 * TOKENS] if path else prose(8 * TOKENS)
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert len(ids) >= TOKENS
    return [int(token) for token in ids[:TOKENS]]


def loss(logits: np.ndarray[Any, Any], wanted: list[int]) -> float:
    """The sum of -log p of the tokens that follow, in float64."""
    rows = np.asarray(logits, np.float64)[: len(wanted)]
    top = rows.max(-1)
    return float((np.log(np.exp(rows - top[:, None]).sum(-1)) + top - rows[np.arange(len(wanted)), wanted]).sum())


def perplexity(forward: Callable[[list[int]], Any], ids: list[int]) -> float:
    """Of a text that is read in pieces, each piece's logits at once."""
    total = sum(loss(forward(ids[at : at + CHUNK]), ids[at + 1 : at + CHUNK + 1]) for at in range(0, len(ids), CHUNK))
    return math.exp(total / (len(ids) - 1))


def dequantised_perplexity(folder: Path, ids: list[int]) -> float:
    """The same weights in float32, by transformers."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    state = dequantised_checkpoint(folder)
    model = transformers_model(config, {"lm_head.weight": state["model.embed_tokens.weight"]} | state).float()
    cache = DynamicCache()

    def forward(piece: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([piece]), cache=cache, use_cache=True).logits[0].numpy()

    return perplexity(forward, ids)


@pytest.mark.parametrize("method", ["gptq", "awq", "nf4"])
def test_a_real_model(method: str, float_model: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Accuracy level 4, as it runs; a float cache, so that only weights and activations count."""
    folder = tmp_path / method
    if method == "nf4":
        with_bitsandbytes(float_model, folder)
    else:
        with_gptqmodel(request.getfixturevalue("gptqmodel"), method, float_model, folder)
    check(folder, tmp_path / "home")


def check(folder: Path, home: Path) -> None:
    """The answer, and the perplexity to 1 %."""
    question = ["chat", str(folder), "-p", "What is the capital of France?", "--temperature", "0", "--home", str(home)]
    answer = subprocess.run([sys.executable, "-m", "edgekv", *question], capture_output=True, text=True, check=False)
    assert "Paris" in answer.stdout, answer
    model, ids = prepare(str(folder), home=home), text_ids(folder)
    engine = open_test_engine(model, KVSpec(TOKENS + 64, "float"), level=4)
    ours = perplexity(lambda piece: engine.forward(piece, all_logits=True), ids)
    engine.close()
    theirs = dequantised_perplexity(folder, ids)
    print(f"\n{model.description.source_scheme}: perplexity {ours:.4f}, dequantised in transformers {theirs:.4f}, "
          f"ratio {ours / theirs:.5f}; {answer.stdout.strip()!r}")  # fmt: skip
    assert ours == pytest.approx(theirs, rel=0.01)
