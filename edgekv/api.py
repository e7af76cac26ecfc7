"""The public door: `edgekv.load(...)` -> Runtime.

    import edgekv

    with edgekv.load("smollm2-135m-instruct", memory="1GiB") as runtime:
        session = runtime.session(system="Answer briefly.")
        for event in session.send("What is the capital of France?"):
            if isinstance(event, edgekv.TextDelta):
                print(event.text, end="", flush=True)

A Runtime is one model, one engine and one cache, planned before it loads. Answers run one at a time. Threads may share
it: each waits for its turn, in the order they asked (edgekv/sharing.py). For event loops there is `AsyncRuntime`. In
the thread that loaded the model, starting another answer ends the one before, unless another thread reads that one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgekv import device as hardware
from edgekv.chat import Chat, ChatRequest, Dialogue, Events
from edgekv.engines import Choice, choose
from edgekv.engines.base import Engine
from edgekv.engines.rope import length_mark
from edgekv.errors import BadCheckpoint, InvalidOption
from edgekv.generate import Event, Finished
from edgekv.kv.plan import Plan
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVDtype, KVSpec
from edgekv.model.converted import TEMPLATE, TOKENIZER, ConvertedModel
from edgekv.options import LoadOptions, home_of, plan_for
from edgekv.parking import ParkingLot
from edgekv.prepare import Progress, find_scales, prepare, published_source
from edgekv.sampling import SamplingOptions
from edgekv.session import Session
from edgekv.session_file import CacheIdentity
from edgekv.sharing import SharedChat
from edgekv.text.precheck import LengthReport, Overflow
from edgekv.text.prompt import ChatFormat
from edgekv.text.template import ChatTemplate, Message, Tool
from edgekv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgekv.engines.onnx.options import Attention, OnnxOptions
    from edgekv.engines.torch.engine import TorchOptions

OnEvent = Callable[[Event], object]
"""Is called with each event of an answer; an exception from it ends the answer and is raised."""

PARKED_CACHES = 4
"""Conversations that wait may use the disk for so many times the whole cache (parking.py)."""

Reply = Finished
"""A whole answer: text, finish_reason, usage."""


def load(model: str | os.PathLike[str], **options: Any) -> Runtime:
    """Load a model: a catalog name, a directory made by `edgekv convert`, a GGUF file, safetensors or an ONNX graph.

    Args:
        model: what to load; it is downloaded and converted the first time.
        options: fields of `LoadOptions`: memory, context, kv_dtype, granularity, sinks, stride, overflow, scales,
            device, engine, threads, home.

    Raises:
        InvalidOption: an unknown option or value. MemoryBudgetError: it does not fit. ScalesError: it has no KV scales
            yet (`edgekv calibrate MODEL` makes them). ModelNotFound, DownloadFailed, BadCheckpoint, UnsupportedModel:
            see `edgekv.errors`.
    """
    known = {field.name for field in fields(LoadOptions)}
    if unknown := sorted(options.keys() - known):
        raise InvalidOption(f"load() has no option {unknown[0]!r}: the options are {', '.join(sorted(known))}.")
    chosen = LoadOptions(**options)
    return open_runtime(prepare(os.fspath(model), home=home_of(chosen)), chosen)


def open_runtime(model: ConvertedModel, options: LoadOptions, *, server: bool = False) -> Runtime:
    """Plan, find the scales and open the engine. server: plan with what `edgekv serve` takes beside."""
    plan = plan_for(model, options, server=server)
    check_combination(plan.kv, options)
    path = None if options.scales is None else Path(options.scales)
    scales = find_scales(model, options.kv_dtype, options.granularity, path)
    return Runtime(model, plan, open_engine(model, plan.kv, scales, options), options)


def choose_engine(options: LoadOptions, dtype: KVDtype | None = None) -> Choice:
    """Which engine serves these options, and why. dtype: of the cache, where it is another than the options'."""
    return choose(options.engine, options.device, dtype or options.kv_dtype)


def check_combination(kv: KVSpec, options: LoadOptions) -> None:
    """Refuse what the chosen engine does not run, before anything is loaded.

    Raises:
        InvalidOption, UnsupportedModel, DependencyMissing: says what to use instead.
    """
    if choose_engine(options, kv.dtype).name == "torch":
        from edgekv.engines.torch import engine as torch_engine

        torch_engine.check_combination(kv, torch_options(options))
    else:
        from edgekv.engines.onnx import options as onnx_choices

        onnx_choices.check_combination(kv, onnx_options(options))


def open_engine(
    model: ConvertedModel,
    kv: KVSpec,
    scales: KVScales | None,
    options: LoadOptions,
    *,
    attention: Attention = "auto",
    activations: Literal["int8", "float"] = "int8",
) -> Engine:
    """The engine for this cache. attention: the onnx engine's operator; activations: what its matrices multiply."""
    if choose_engine(options, kv.dtype).name == "torch":
        return _open_torch(model, kv, scales, options)
    from edgekv.engines.onnx.engine import open_engine
    from edgekv.engines.onnx.options import ACCURACY_LEVELS

    level = ACCURACY_LEVELS[activations]
    return open_engine(model, kv, scales, replace(onnx_options(options), attention=attention, accuracy_level=level))


def _open_torch(model: ConvertedModel, kv: KVSpec, scales: KVScales | None, options: LoadOptions) -> Engine:
    """The torch engine reads the published weights and holds them as the conversion did."""
    from edgekv.convert import reopen
    from edgekv.engines.torch.engine import open_engine
    from edgekv.engines.torch.loader import Published

    path = published_source(model, home_of(options))
    source, matrix = reopen(model, path)
    return open_engine(Published(path, source, matrix), model.fingerprint, kv, scales, torch_options(options))


def onnx_options(options: LoadOptions) -> OnnxOptions:
    """The part of the options that is the onnx engine's."""
    from edgekv.engines.onnx.options import OnnxOptions

    return OnnxOptions(threads=threads_of(options), device=options.device)


def torch_options(options: LoadOptions) -> TorchOptions:
    """The part of the options that is the torch engine's."""
    from edgekv.engines.torch.engine import TorchOptions

    return TorchOptions(threads=threads_of(options), device=options.device)


def threads_of(options: LoadOptions) -> int:
    """CPU threads."""
    return options.threads or hardware.physical_cores()


def open_text(model: ConvertedModel) -> tuple[Tokenizer, ChatFormat | None]:
    """A model's tokenizer and, if it has a template, its chat format."""
    if not (model.folder / TOKENIZER).exists():
        raise BadCheckpoint(f"{model.folder} has no tokenizer: copy the model's tokenizer.json into it.")
    tokenizer = Tokenizer.from_file(model.folder / TOKENIZER)
    template = model.folder / TEMPLATE
    if not template.exists():
        return tokenizer, None
    try:
        source = template.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"The chat template {template} cannot be read: {error}.") from None
    description = model.description
    return tokenizer, ChatFormat(
        tokenizer, ChatTemplate(source, bos_token=description.bos_token, eos_token=description.eos_token)
    )


class Runtime:
    """A loaded model. Use it as a context manager, or call `close()`."""

    def __init__(
        self,
        model: ConvertedModel,
        plan: Plan,
        engine: Engine,
        options: LoadOptions,
    ) -> None:
        self.model, self.options = model, options
        self.plan = replace(plan, kv=engine.kv)  # torch halves the cache where the device's memory does not suffice
        tokenizer, chat_format = open_text(model)
        self.template_source = "" if chat_format is None else chat_format.template.source
        bos = model.spec.bos_id if model.description.add_bos else None
        fingerprint = model.fingerprint + length_mark(model.spec, engine.kv.capacity)
        identity = CacheIdentity.of(
            fingerprint, model.description.name, engine.kv, engine.scales, row_factors=engine.row_factors
        )
        left_bytes = max(0, (plan.budget_bytes or 0) - plan.total_bytes)
        lot = ParkingLot(left_bytes, home_of(options) / "parked", PARKED_CACHES * plan.cache_bytes)
        self._chat = SharedChat(engine, tokenizer, chat_format, bos, identity, lot)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def engine_choice(self) -> Choice:
        """Which engine runs, and why."""
        return choose_engine(self.options)

    @property
    def sampling(self) -> SamplingOptions:
        """The model maker's recommended sampling, over edgekv's defaults."""
        return _sampling(SamplingOptions(), dict(self.model.description.sampling))

    @property
    def chat_state(self) -> Chat:
        """The cache and its timeline, for tools."""
        return self._chat

    def precheck(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), **sampling: Any) -> LengthReport:
        """What these messages would do to the cache: their length, what is reused, what would leave. Nothing runs."""
        return self._chat.precheck(self._request(messages, sampling, tools))

    def stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        dialogue: Dialogue | None = None,
        **sampling: Any,
    ) -> Events:
        """Answer messages as a stream of events (TextDelta, Evicted, PrefillProgress, and Finished at the end).

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            tools: what the model may call, as OpenAI describes tools; calls come as text, in the model's own way.
            dialogue: whose messages they are, if a cache is to be kept for it while others have their turn.
            sampling: fields of `SamplingOptions`: temperature, top_k, top_p, min_p, repetition_penalty, seed,
                max_new_tokens, stop, json_schema, grammar, top_logprobs.

        Raises:
            ContextOverflow: the messages do not fit; raised before anything runs.
            TemplateError: the model's template refuses them. InvalidOption: an unknown sampling option.
        """
        return self._chat.stream(self._request(messages, sampling, tools, dialogue))

    def stream_text(self, prompt: str, **sampling: Any) -> Events:
        """Continue plain text, without a chat template, as a stream of events. Otherwise as `stream`."""
        return self._chat.stream_text(prompt, _sampling(self.sampling, sampling), self.options.overflow)

    def chat(self, messages: Sequence[Message], *, on_event: OnEvent | None = None, **options: Any) -> Reply:
        """Answer messages, whole. `on_event` is called with every event; the rest is as for `stream`."""
        return _last(self.stream(messages, **options), on_event)

    def generate(self, prompt: str, *, on_event: OnEvent | None = None, **sampling: Any) -> Reply:
        """Continue plain text, without a chat template, whole. `on_event` is called with every event."""
        return _last(self.stream_text(prompt, **sampling), on_event)

    def session(self, *, system: str = "", overflow: Overflow | None = None, **sampling: Any) -> Session:
        """A dialogue that remembers. `overflow` None takes the runtime's policy."""
        policy = self.options.overflow if overflow is None else overflow
        return Session(self._chat, system=system, sampling=_sampling(self.sampling, sampling), overflow=policy)

    def close(self) -> None:
        """Free the engine and the cache. Closing twice is fine."""
        self._chat.close()

    def _request(
        self,
        messages: Sequence[Message],
        sampling: dict[str, Any],
        tools: Sequence[Tool],
        dialogue: Dialogue | None = None,
    ) -> ChatRequest:
        return ChatRequest(messages, _sampling(self.sampling, sampling), self.options.overflow, tools, dialogue)


def _sampling(base: SamplingOptions, changes: dict[str, Any]) -> SamplingOptions:
    known = {field.name for field in fields(SamplingOptions)}
    if unknown := sorted(changes.keys() - known):
        raise InvalidOption(f"There is no sampling option {unknown[0]!r}: the options are {', '.join(sorted(known))}.")
    if isinstance(changes.get("stop"), list):
        changes = changes | {"stop": tuple(changes["stop"])}
    if isinstance(changes.get("json_schema"), dict):
        changes = changes | {"json_schema": json.dumps(changes["json_schema"])}
    return replace(base, **changes)


def _last(events: Events, on_event: OnEvent | None) -> Reply:
    """Run a stream to its end, or until `on_event` raises: whoever keeps that exception must not keep the turn."""
    with closing(events):
        for event in events:
            if on_event is not None:
                on_event(event)
            if isinstance(event, Finished):
                return event
    raise AssertionError("a stream that was not interrupted ends with Finished")


__all__ = ["LoadOptions", "Progress", "Reply", "Runtime", "load"]
