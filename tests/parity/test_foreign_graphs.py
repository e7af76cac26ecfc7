"""Other makers' ONNX graphs run where they lie and give their maker's logits.

The graphs of tests/data/onnx were made of two checkpoints of helpers/checkpoints.py by the public tools, CPU:

    genai-*      onnxruntime-genai 0.18.0, `python -m onnxruntime_genai.models.builder -i CHECKPOINT -o OUT -e cpu`
                 fp32                -p fp32, of "llama"
                 qwen2-int4          -p int4, of "qwen2"
                 int8-cache          -p fp32, kv_cache_quant_scheme=int8_per_channel, every scale 0.05
                 last-logits         -p fp32, prune_lm_head=true fuse_qkv=false
                 fp16                -p fp16 -e dml: RotaryEmbedding apart, position_ids
                 web                 -p int4 -e webgpu: float16 around 4 bits
                 gemma2              -p fp32, of "gemma2" of helpers/families.py: a window, softcaps, a scale
    optimum-*    optimum-onnx 0.1.0, `python -m optimum.exporters.onnx --task text-generation-with-past`, of both
    browser-q4   optimum-llama through onnxruntime 1.32.0's MatMulNBitsQuantizer (block 32), laid out as repositories
                 for browsers are

The oracle is the maker's own graph, run as it is by ONNX Runtime. Largest relative difference of a token's logits,
measured 2026-11-29 on x86-64, onnxruntime 1.32.0, float cache: float32 graphs 0 to 1e-6, 4 bits with float32 around
them 0 to 1e-6 (bound for both 1e-5), float16 1e-3 to 2e-2 (bound 3e-2).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import ATTENTION, TinyModels
from helpers.chat import TEMPLATE
from helpers.engines import measured_scales
from helpers.families import VARIANTS, write_variant
from helpers.families import WINDOW as FAMILY_WINDOW
from helpers.in_cache import InCacheModel, load
from helpers.reference import SinkModel, relative_errors
from safetensors.torch import load_file
from transformers import AutoConfig

import edgekv
from edgekv.adopt import adopt
from edgekv.engines.measured_rope import rope_of_tables
from edgekv.engines.onnx.engine import OnnxEngine
from edgekv.engines.rope import rope_tables
from edgekv.errors import BadCheckpoint, EdgeKVError, ModelNotFound, UnsupportedModel
from edgekv.generate import Timeline
from edgekv.kv.scales import write_scales
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.model.foreign import find_foreign
from edgekv.model.spec import RopeSpec
from edgekv.prepare import prepare

DATA = Path(__file__).parents[1] / "data" / "onnx"
SOURCES = {"genai-qwen2-int4": "qwen2", "optimum-qwen2": "qwen2"}
EXACT, HALF = 1e-5, 3e-2
BOUNDS = {
    "genai-fp32": EXACT, "genai-qwen2-int4": EXACT, "genai-int8-cache": EXACT, "genai-last-logits": EXACT,
    "genai-fp16": HALF, "genai-web": HALF, "optimum-llama": EXACT, "optimum-qwen2": EXACT, "browser-q4": EXACT,
}  # fmt: skip
IDS = np.random.default_rng(3).integers(3, 512, 40).tolist()
OpenEngine = Callable[..., OnnxEngine]


@pytest.fixture(params=ATTENTION)
def attention(request: Any) -> str:
    """Every test here that opens an engine runs with each attention operator."""
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Copies of tests/data/onnx, with a tokenizer and a chat template."""

    def copy(name: str) -> Path:
        made = Path(shutil.copytree(DATA / name, tmp_path / name))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(DATA.parent / "llama-fp16" / file, made / file)
        (made / "chat_template.jinja").write_text(TEMPLATE)
        return made

    return copy


@pytest.fixture
def adopted(folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], ConvertedModel]:
    """The model directory of one of them."""
    return lambda name: prepare(str(folder(name)), home=tmp_path / "home")


def makers_logits(graph: Path, ids: list[int]) -> Any:
    """What the maker's graph gives for `ids`, nothing cached: [T, V], or [1, V] of the last token."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(graph), options)
    tokens = np.array([ids])
    given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(len(ids))[None]}
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    feeds = {
        each.name: given.get(each.name, np.zeros((1, 2, 0, 16), kinds[each.type])) for each in session.get_inputs()
    }
    return session.run(["logits"], feeds)[0][0].astype(np.float32)


def relayed(source: Path, target: Path) -> Path:
    """The graph of a folder laid out as hub repositories for browsers are: onnx/model_q4.onnx, configs above it."""
    (target / "onnx").mkdir(parents=True)
    model = onnx.load(source / "model.onnx")
    onnx.save(
        model, target / "onnx" / "model_q4.onnx", save_as_external_data=True, location="model_q4.onnx_data",
        size_threshold=64,
    )  # fmt: skip
    genai = json.loads((source / "genai_config.json").read_text())["model"]
    config = {"model_type": genai["type"], "max_position_embeddings": genai["context_length"], "eos_token_id": 2}
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0, "bos_token_id": 1}))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / file, target / file)
    return target


def contents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Hash, time and inode of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
            path.stat().st_ino,
        )
        for path in files
    }


# ---- the logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDS)
def test_logits_are_the_makers(adopted: Callable[[str], ConvertedModel], open_onnx: OpenEngine, name: str) -> None:
    """After every token, in one run and one by one. A quantised cache is replaced, so its float twin is the oracle."""
    model = adopted(name)
    level = 1 if name == "browser-q4" else 4  # that graph says nothing of it, and ONNX Runtime then takes float32
    engine = open_onnx(model, KVSpec(64, "float"), level=level)
    found = engine.forward(IDS, all_logits=True)
    wanted = makers_logits(next((DATA / name.replace("int8-cache", "fp32")).rglob("*.onnx")), IDS)
    assert relative_errors(found[-len(wanted) :], wanted).max() < BOUNDS[name]
    engine.reset()
    steps = np.stack([engine.forward([token]) for token in IDS])
    assert relative_errors(steps, found).max() < BOUNDS[name]


def test_the_layout_of_browsers(folder: Callable[[str], Path], tmp_path: Path, open_onnx: OpenEngine) -> None:
    """onnx/model_q4.onnx below the configs: by the folder's name and by the file's."""
    hub = relayed(folder("genai-qwen2-int4"), tmp_path / "hub")
    wanted = makers_logits(hub / "onnx" / "model_q4.onnx", IDS)
    for target in (hub, hub / "onnx" / "model_q4.onnx"):
        model = prepare(str(target), home=tmp_path / "home")
        assert model.spec.family == "qwen2"
        engine = open_onnx(model, KVSpec(64, "float"), level=4)
        assert relative_errors(engine.forward(IDS, all_logits=True), wanted).max() < EXACT


def test_weights_inside_the_graph_file(folder: Callable[[str], Path], tmp_path: Path, open_onnx: OpenEngine) -> None:
    """They are read where they lie in it."""
    source = folder("genai-fp32")
    onnx.save(onnx.load(source / "model.onnx"), source / "model.onnx")
    (source / "model.onnx.data").unlink()
    model = prepare(str(source), home=tmp_path / "home")
    assert list(model.description.graph_files) == ["model.onnx"]
    found = open_onnx(model, KVSpec(64, "float")).forward(IDS, all_logits=True)
    assert relative_errors(found, makers_logits(DATA / "genai-fp32" / "model.onnx", IDS)).max() < EXACT


@pytest.mark.parametrize("name", ["genai-fp32", "genai-last-logits", "optimum-llama", "optimum-qwen2"])
def test_evictions_are_those_of_the_float_reference(
    adopted: Callable[[str], ConvertedModel], tiny_models: TinyModels, open_onnx: OpenEngine, name: str
) -> None:
    """Case C06, on a graph whose RoPE tables became inputs; bounds as in test_eviction.py."""
    ids = np.random.default_rng(1).integers(3, 512, 260).tolist()
    engine = open_onnx(adopted(name), KVSpec(64, "float", sinks=4, stride=8))
    timeline = Timeline(engine)
    timeline.rewind(ids, 4)
    found = timeline.append(ids, [], all_logits=True)[0]
    source = tiny_models.source(SOURCES.get(name, "llama"))
    state = load_file(source / "model.safetensors")
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    wanted = SinkModel(AutoConfig.from_pretrained(source), state, 64, 8, 4).run(ids)
    assert engine.evicted >= 190
    assert relative_errors(found, wanted).max() < 1e-4


@pytest.mark.parametrize("name", ["genai-fp32", "genai-qwen2-int4", "genai-web", "optimum-qwen2"])
def test_an_int8_cache_with_measured_scales(
    adopted: Callable[[str], ConvertedModel], open_onnx: OpenEngine, name: str
) -> None:
    """Its logits are within 3 % of the float cache's, evictions included (0.4 to 1.3 % measured, mean)."""
    model = adopted(name)
    ids = np.random.default_rng(1).integers(3, 512, 200).tolist()
    scales = measured_scales(model, "int8", "channel", ids)
    found = []
    for kv, given in ((KVSpec(64, "float", sinks=4, stride=8), None), (KVSpec(64, sinks=4, stride=8), scales)):
        timeline = Timeline(open_onnx(model, kv, given))
        timeline.rewind(ids, 4)
        found.append(timeline.append(ids, [], all_logits=True)[0])
    assert relative_errors(found[1], found[0]).mean() < 3e-2


def test_links_are_followed(folder: Callable[[str], Path], tmp_path: Path, open_onnx: OpenEngine) -> None:
    """The hub's cache keeps every file under its hash and links to it, which ONNX Runtime by itself refuses."""
    source, blobs = folder("genai-fp32"), tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    model = prepare(str(source), home=tmp_path / "home")
    assert sorted(model.description.graph_files) == ["model.onnx", "model.onnx.data"]
    found = open_onnx(model, KVSpec(64, "float")).forward(IDS, all_logits=True)
    assert relative_errors(found, makers_logits(DATA / "genai-fp32" / "model.onnx", IDS)).max() < EXACT


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_rope_of_no_known_kind_is_measured(dtype: Any) -> None:
    """YaRN's tables without its parameters: continued 28,000 rows beyond those that were compared."""
    rope = RopeSpec(kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.1386)
    tables = [table.astype(dtype).astype(np.float32) for table in rope_tables(rope, 64, 0, 4096)]
    found = rope_of_tables(*tables, [])
    assert found.factors
    far = [np.stack(rope_tables(each, 64, 30_000, 50)) for each in (found, rope)]
    assert np.abs(far[0] - far[1]).max() < (1e-3 if dtype == np.float32 else 4e-2)


# ---- the user's folder -----------------------------------------------------------------------------------------------


def test_a_folder_is_never_written(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Read-only, loaded, chatted with: every file is the same in content, time and inode; the home gets no weights."""
    source = folder("genai-qwen2-int4")
    before = contents(source)
    for path in [*source.iterdir(), source]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    model = prepare(str(source), home=tmp_path / "home")
    scales = measured_scales(model, "int8", "channel", IDS)
    write_scales(model.folder / "kv_scales.safetensors", scales)
    with edgekv.load(source, home=tmp_path / "home", context=128, threads=1) as runtime:
        assert runtime.chat([{"role": "user", "content": "Hi"}], max_new_tokens=4).usage.output_tokens > 0
    source.chmod(0o755)
    assert contents(source) == before
    written = sum(path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file())
    assert written < model.description.weight_bytes / 2


def test_the_command_line(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """info and chat by the folder's name."""

    def edgekv_(*arguments: object) -> str:
        command = [sys.executable, "-m", "edgekv", *map(str, arguments), "--home", str(tmp_path / "home")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    source = folder("optimum-llama")
    before = edgekv_("info", source)
    assert "attention in plain operators fused into GroupQueryAttention" in before
    assert "not run yet" in before
    answers = [edgekv_("chat", source, "-p", "Hello", "--max-new-tokens", 3, "--temperature", 0) for _ in range(2)]
    assert answers[0] == answers[1] != ""
    assert "KV scales" in edgekv_("info", source)


def test_adopted_once_and_again_when_it_changes(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A touched file keeps the scales, a changed one does not; a model opened by its own directory says so."""
    source, home = folder("genai-fp32"), tmp_path / "home"
    first = prepare(str(source), home=home)
    write_scales(first.folder / "kv_scales.safetensors", measured_scales(first, "int8", "channel", IDS))
    stamp = (first.folder / "edgekv.json").stat().st_mtime_ns
    assert prepare(str(source), home=home).folder == first.folder
    assert (first.folder / "edgekv.json").stat().st_mtime_ns == stamp
    os.utime(source / "model.onnx.data", ns=(1, 1))
    with pytest.raises(BadCheckpoint, match=r"model.onnx.data has changed since"):
        prepare(str(first.folder), home=home)
    again = prepare(str(source), home=home)
    assert again.fingerprint == first.fingerprint
    assert (again.folder / "kv_scales.safetensors").exists()
    with (source / "model.onnx.data").open("r+b") as file:
        file.seek(4096)
        file.write(np.float32(0.5).tobytes())
    changed = prepare(str(source), home=home)
    assert changed.fingerprint != first.fingerprint
    assert not (changed.folder / "kv_scales.safetensors").exists()


WINDOW = 16


def windows_and_softcap(graph: onnx.GraphProto) -> None:
    """As in Gemma: the first layer sees a window and turns at another base, and both bound their scores."""
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    for node, size in zip(nodes, (WINDOW, -1), strict=True):
        kept = [a for a in node.attribute if a.name not in ("local_window_size", "softcap")]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.append(onnx.helper.make_attribute("local_window_size", size))
        node.attribute.append(onnx.helper.make_attribute("softcap", 2.0))
    for index, table in ((7, "cos_cache"), (8, "sin_cache")):
        angles = np.outer(np.arange(2048), 500.0 ** -(np.arange(8) / 8))
        values = (np.cos if table == "cos_cache" else np.sin)(angles).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(values, f"{table}_local"))
        nodes[0].input[index] = f"{table}_local"


def test_windows_softcaps_and_a_second_rope(
    folder: Callable[[str], Path], tmp_path: Path, open_onnx: OpenEngine
) -> None:
    """They are attributes and inputs of the maker's own operator, which is the oracle: up to and beyond the window."""
    source = folder("genai-fp32")
    edited(source, windows_and_softcap)
    model = prepare(str(source), home=tmp_path / "home")
    assert model.spec.windows == (WINDOW, 0)
    assert model.spec.attention.softcap == 2.0
    assert (model.spec.rope.theta, model.spec.local_rope and round(model.spec.local_rope.theta)) == (10000.0, 500)
    found = open_onnx(model, KVSpec(64, "float"), level=4).forward(IDS, all_logits=True)
    assert relative_errors(found, makers_logits(source / "model.onnx", IDS)).max() < EXACT
    assert relative_errors(found, makers_logits(DATA / "genai-fp32" / "model.onnx", IDS)).mean() > HALF


def test_windows_through_evictions(folder: Callable[[str], Path], tmp_path: Path, open_onnx: OpenEngine) -> None:
    """Of a graph whose operator drops what left the window; the oracle is transformers' layers. Measured: 2e-6."""
    model = prepare(str(folder("genai-gemma2")), home=tmp_path / "home")
    assert model.spec.windows == (FAMILY_WINDOW, 0)
    ids = np.random.default_rng(5).integers(3, 500, 150).tolist()
    engine = open_onnx(model, KVSpec(64, "float", sinks=4, stride=8))
    timeline = Timeline(engine)
    timeline.rewind(ids, 4)
    found = timeline.append(ids, all_logits=True)[0]
    checkpoint = load(write_variant(VARIANTS["gemma2"], tmp_path / "gemma2"))
    assert engine.evicted >= 80
    assert relative_errors(found, InCacheModel(checkpoint, 64, 8, 4).run(ids)).max() < EXACT


# ---- what cannot be run ----------------------------------------------------------------------------------------------


def edited(source: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    """Change a folder's graph, its weights left in their file."""
    model = onnx.load(source / "model.onnx", load_external_data=False)
    edit(model.graph)
    (source / "model.onnx").write_bytes(model.SerializeToString())


def attention_of(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "GroupQueryAttention")


def set_attribute(name: str, value: Any) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        node = attention_of(graph)
        for old in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(old)
        node.attribute.append(onnx.helper.make_attribute(name, value))

    return edit


def fused_later(kind: str, change: Callable[[onnx.NodeProto], Any]) -> Callable[[onnx.GraphProto], None]:
    """Change the first node of a kind."""
    return lambda graph: change(next(node for node in graph.node if node.op_type == kind)) and None


def of_kind(node: onnx.NodeProto, kind: str) -> None:
    node.op_type = kind


def set_axis(node: onnx.NodeProto, axis: int) -> None:
    node.attribute[0].i = axis


def window(graph: onnx.GraphProto) -> None:
    """The mask lets a token see the newest sixteen only."""
    place, node = next((i, node) for i, node in enumerate(graph.node) if node.op_type == "LessOrEqual")
    keys, queries, result = *node.input, node.output[0]
    node.output[0] = "causal"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(16), "sixteen"))
    make = onnx.helper.make_node
    graph.node.insert(place + 1, make("And", ["causal", "near"], [result]))
    graph.node.insert(place + 1, make("Greater", [keys, "edge"], ["near"]))
    graph.node.insert(place + 1, make("Sub", [queries, "sixteen"], ["edge"]))


def other_halves(graph: onnx.GraphProto) -> None:
    """The first rotation turns the other way in its halves, which no operator's name shows."""
    first, second = [node for node in graph.node if node.op_type == "Slice" and "self_attn" in node.name][:2]
    bounds = list(first.input[1:]), list(second.input[1:])
    del first.input[1:], second.input[1:]
    first.input.extend(bounds[1])
    second.input.extend(bounds[0])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            fused_later("Softmax", lambda node: node.attribute[0].CopyFrom(onnx.helper.make_attribute("axis", 1))),
            "axis",
        ),
        (fused_later("Neg", lambda node: of_kind(node, "Abs")), r"is Abs, expected Neg"),
        (fused_later("LessOrEqual", lambda node: of_kind(node, "Less")), r"mask .*is not plainly causal"),
        (fused_later("Softmax", lambda node: of_kind(node, "LogSoftmax")), r"still needs 'past_key_values.0"),
        (window, r"mask .*is not plainly causal"),
        (other_halves, r"cannot be adapted: its logits .* differ by"),
    ],
)
def test_attention_that_cannot_be_fused(
    folder: Callable[[str], Path], tmp_path: Path, edit: Callable[[onnx.GraphProto], None], words: str
) -> None:
    """Refused with the value that does not fit and what to do instead, or because the logits show it."""
    source = folder("optimum-llama")
    edited(source, edit)
    with pytest.raises(UnsupportedModel, match=words):
        prepare(str(source), home=tmp_path / "home")
    assert not list((tmp_path / "home").rglob("edgekv.json"))


def unknown_attention(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            node.op_type = "PagedAttention"


def other_heads(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for a in node.attribute:
            if a.name == "num_heads":
                a.i = 8


def mask_elsewhere(graph: onnx.GraphProto) -> None:
    """The mask also scales the logits."""
    graph.node[-1].output[0] = "plain"
    graph.node.append(onnx.helper.make_node("Cast", ["attention_mask"], ["mask.float"], to=1))
    graph.node.append(onnx.helper.make_node("ReduceMean", ["mask.float"], ["mask.mean"], keepdims=0))
    graph.node.append(onnx.helper.make_node("Mul", ["plain", "mask.mean"], ["logits"]))


def embedded_elsewhere(graph: onnx.GraphProto) -> None:
    next(value for value in graph.input if value.name == "input_ids").name = "inputs_embeds"
    for node in graph.node:
        node.input[:] = ["inputs_embeds" if name == "input_ids" else name for name in node.input]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (unknown_attention, r"no GroupQueryAttention.*edgekv convert"),
        (set_attribute("softcap", 30.0), r"softcap is \[0.0, 30.0\] in its layers.*edgekv convert"),
        (set_attribute("rotary_interleaved", 1), r"interleaved rotation"),
        (set_attribute("do_rotary", 0), r"does not rotate"),
        (set_attribute("num_heads", 8), r"num_heads is \[4, 8\]"),
        (set_attribute("sinks_of_another_version", 1), r"sinks_of_another_version"),
        (other_heads, r"columns, but 8 query and 2 key-value heads of 16 need 192"),
        (mask_elsewhere, r"needs .attention_mask., which edgekv does not give"),
        (embedded_elsewhere, r"no input_ids"),
    ],
)
def test_graphs_that_do_not_run(
    folder: Callable[[str], Path], tmp_path: Path, edit: Callable[[onnx.GraphProto], None], words: str
) -> None:
    """One sentence that names the node or the value; no directory is made."""
    source = folder("genai-fp32")
    edited(source, edit)
    with pytest.raises((UnsupportedModel, BadCheckpoint), match=words):
        prepare(str(source), home=tmp_path / "home")
    assert not list((tmp_path / "home").rglob("edgekv.json"))


def cut_data(source: Path) -> None:
    os.truncate(source / "model.onnx.data", 100_000)


def cut_graph(source: Path) -> None:
    os.truncate(source / "model.onnx", 5_000)


def no_graph(source: Path) -> None:
    (source / "model.onnx").write_bytes(b"\0" * 500)


def other_config(source: Path) -> None:
    config = json.loads((source / "genai_config.json").read_text())
    config["model"]["decoder"]["num_attention_heads"] = 16
    (source / "genai_config.json").write_text(json.dumps(config))


def list_config(source: Path) -> None:
    (source / "genai_config.json").write_text("[]")


def elsewhere(source: Path) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../model.onnx.data"

    edited(source, edit)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda source: (source / "model.onnx.data").unlink(), r"needs model.onnx.data, which is not in"),
        (lambda source: (source / "model.onnx").unlink(), r"lacks model.onnx, the graph that its genai_config.json"),
        (cut_data, r"model.onnx.data has 100,000 bytes"),
        (cut_graph, r"cannot be read as an ONNX model"),
        (no_graph, r"cannot be read as an ONNX model"),
        (other_config, r"says num_attention_heads 16, but model.onnx has 4"),
        (list_config, r"holds list, not an object"),
        (elsewhere, r"lies outside of the folder"),
    ],
)
def test_damaged_folders(
    folder: Callable[[str], Path], tmp_path: Path, harm: Callable[[Path], Any], words: str
) -> None:
    """One sentence that names the file."""
    source = folder("genai-fp32")
    harm(source)
    with pytest.raises(BadCheckpoint, match=words):
        prepare(str(source), home=tmp_path / "home")
    assert not list((tmp_path / "home").rglob("edgekv.json"))


def test_a_folder_without_a_tokenizer(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As optimum may write it: the graph is adapted and compared, and runs on token ids."""
    source = folder("genai-fp32")
    (source / "tokenizer.json").unlink()
    model = prepare(str(source), home=tmp_path / "home")
    assert not model.description.tokenizer
    assert not (model.folder / "tokenizer.json").exists()


def test_mutated_graphs_never_crash(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Bytes changed at random, seeded: it runs, or one of our own errors."""
    source = folder("genai-fp32")
    whole, random = (source / "model.onnx").read_bytes(), np.random.default_rng(0)
    foreign = find_foreign(source)
    assert foreign is not None
    for _ in range(100):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 4):
            data[place] = random.integers(256)
        (source / "model.onnx").write_bytes(data)
        try:
            adopt(foreign, tmp_path / "out", name="x")
        except EdgeKVError:
            continue


def test_several_graphs_and_none(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The one of 4 bits is taken; where none has a known name the user is asked for it."""
    hub = relayed(folder("genai-fp32"), tmp_path / "hub")
    for name in ("model.onnx", "model_fp16.onnx"):
        shutil.copyfile(hub / "onnx" / "model_q4.onnx", hub / "onnx" / name)
    found = find_foreign(hub)
    assert found is not None
    assert found.graph.name == "model_q4.onnx"
    for path in (hub / "onnx").glob("*.onnx"):
        path.rename(path.with_name(f"decoder_{path.name}"))
    with pytest.raises(UnsupportedModel, match=r"holds 3 ONNX graphs.*name the one to run"):
        prepare(str(hub), home=tmp_path / "home")
    for path in (hub / "onnx").glob("*.onnx"):
        path.unlink()
    with pytest.raises(ModelNotFound):
        prepare(str(hub), home=tmp_path / "home")
