"""A tiny model that chats: the random checkpoint of tests/data with a ChatML-like template, and its KV scales."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from edgekv.convert import convert
from edgekv.kv.scales import scales_name, write_scales
from edgekv.model.converted import ConvertedModel
from helpers.engines import measured_scales

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_chat_model(source: Path, folder: Path, template: str = TEMPLATE) -> ConvertedModel:
    """Copy a checkpoint, give it a template, convert it and write INT8 scales beside it."""
    copy = folder / "source"
    shutil.copytree(source, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    model = convert(copy, folder / "tiny-chat", sampling={"temperature": 0.0}).model
    scales = measured_scales(model, "int8", "channel", [(7 * i) % model.spec.vocab_size for i in range(400)])
    write_scales(model.folder / scales_name("int8", "channel"), scales)
    return model
