"""Quantise a float checkpoint with the public quantiser; run by the Python of its own environment (it wants a torch of
its own), never imported.

    python run_gptqmodel.py SOURCE OUT gptq|awq TEXT
"""

import sys
from pathlib import Path

from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoTokenizer

source, out, method, text = sys.argv[1:]
paragraphs = [part for part in Path(text).read_text("utf-8").split("\n\n") if 400 < len(part) < 1200][:16]
assert len(paragraphs) == 16, "the text is too short to calibrate with"
options = {"method": "awq", "format": "gemm"} if method == "awq" else {"desc_act": True, "act_group_aware": False}
tokenizer = AutoTokenizer.from_pretrained(source)
model = GPTQModel.load(source, QuantizeConfig(bits=4, group_size=64, **options), device="cpu")
model.quantize(paragraphs, batch_size=1, tokenizer=tokenizer)
model.save(out)
