"""The text that a calibration looks at, in two parts that share nothing: what is observed, and what is held out.

Without files the model writes the text itself: it answers edgekv's own short prompts (seeds.txt), sampled at a moderate
temperature. What a chat's cache holds is just that: a template's control tokens, questions, and what this model says
(quantising on the model's own text: Liu et al., LLM-QAT, arXiv 2305.17888). With files, excerpts spread evenly over all
of the text are read. Every seventh prompt or excerpt is held out.

On SmolLM2-135M-Instruct, own text generalises better: its scales make 1.29 % of error in the values of unseen prose
(those from prose: 1.25 %), while scales from prose make 1.73 % in the values of unseen chats (from own text: 1.22 %)
and clip three times as many.

The first token of a stream carries keys and values like no other (Xiao et al., StreamingLLM), so excerpts begin with
the token that the model's chats begin with; without a chat format, with BOS if its tokenizer adds it to plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Protocol, TypeVar

from edgekv.calibrate.options import CalibrateOptions
from edgekv.engines.base import Engine, Logits
from edgekv.errors import InvalidOption
from edgekv.kv.spec import MIN_CAPACITY
from edgekv.model.converted import Description
from edgekv.sampling import Sampler, SamplingOptions
from edgekv.text.prompt import ChatFormat
from edgekv.text.template import Message
from edgekv.text.tokenizer import Tokenizer

Item = TypeVar("Item")

CONTINUATION = 160
"""The most tokens the model writes after one prompt."""

SEQUENCE = 2048
"""The most tokens of one excerpt: the cache that observes is no larger, whatever the text."""

HELD_OUT_EVERY = 7
"""Prime to the number of kinds of seed prompt (8, in turn), so that the held-out ones are of many kinds."""

SAMPLING = SamplingOptions(temperature=0.8, top_p=1.0, min_p=0.05)

_FIRST_GUESS_CHARS = 8  # a token; where a text has more, it is read on


Watch = Callable[[int, int], None]
"""Is told of the slots start .. stop-1 while every layer has their rows."""


class Passages(Protocol):
    """Token sequences that an engine can be led through."""

    @property
    def total(self) -> int:
        """About how many tokens there are."""

    def run(self, engine: Engine, watch: Watch = ...) -> Iterator[list[int]]:
        """Yield each sequence while the engine's cache holds exactly it; before that, `watch` is told of all its slots
        from the first on."""


class _Reading:
    """A passage on its way into an empty cache. A layer with a window may hold its last tokens only, so that text is
    shown in pieces no longer than the shortest window."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        engine.reset()
        self._engine, self._watch, self._shown = engine, watch, 0
        self._piece = min(filter(None, engine.spec.windows), default=engine.kv.capacity)

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append tokens; logits after the last."""
        for start in range(0, len(tokens), self._piece):
            part = tokens[start : start + self._piece]
            if self._engine.length + len(part) - self._shown > self._piece:
                self.show()
            logits = self._engine.forward(part)
        return logits

    def show(self) -> None:
        """Show what was not shown yet."""
        start, self._shown = self._shown, self._engine.length
        if start < self._shown:
            self._watch(start, self._shown)


def _look_away(start: int, stop: int) -> None:
    """A watch that does nothing."""


@dataclass(frozen=True)
class Corpus:
    """What one calibration reads."""

    name: str  # for the provenance of the scales
    observed: Passages
    held_out: Passages
    capacity: int  # slots that hold the longest sequence


@dataclass(frozen=True)
class Excerpts:
    """Sequences that are known beforehand."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.sequences))

    def run(self, engine: Engine, watch: Watch = _look_away) -> Iterator[list[int]]:
        """See Passages."""
        for sequence in self.sequences:
            reading = _Reading(engine, watch)
            reading.forward(sequence)
            reading.show()
            yield list(sequence)


@dataclass(frozen=True)
class SelfGenerated:
    """Prompts that the model continues, again and again with other words, until there are `total` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    eos_ids: tuple[int, ...]
    total: int
    seed: int

    def run(self, engine: Engine, watch: Watch = _look_away) -> Iterator[list[int]]:
        """Each prompt with its continuation; see Passages."""
        sampler = Sampler(replace(SAMPLING, seed=self.seed))
        left = self.total
        for prompt in cycle(self.prompts):
            reading = _Reading(engine, watch)
            self._continue(reading, prompt, sampler, min(CONTINUATION, left - len(prompt)))
            reading.show()
            yield list(engine.tokens)
            left -= engine.length
            if left <= 0:
                return

    def _continue(self, reading: _Reading, prompt: Sequence[int], sampler: Sampler, most: int) -> None:
        logits = reading.forward(prompt)
        for _ in range(most):
            token = sampler(logits)
            logits = reading.forward([token])  # the token that ends an answer is in a chat's cache, too
            if token in self.eos_ids:
                break


def open_corpus(
    model: Description, tokenizer: Tokenizer, chat_format: ChatFormat | None, options: CalibrateOptions
) -> Corpus:
    """The text that the options ask for.

    Raises:
        InvalidOption: a file cannot be used, or the files hold too few tokens.
    """
    if options.data:
        return from_files(model, tokenizer, chat_format, options)
    return self_generated(model, tokenizer, chat_format, options)


def seed_prompts() -> list[str]:
    """Short prompts in turn of prose, code, chat, JSON, arithmetic, Chinese, French and Spanish."""
    text = resources.files(__package__).joinpath("seeds.txt").read_text("utf-8")
    return text.splitlines()


def self_generated(
    model: Description, tokenizer: Tokenizer, chat_format: ChatFormat | None, options: CalibrateOptions
) -> Corpus:
    """The seed prompts in the model's own chat format (raw if it has none), to be continued by the model."""
    prompts = [_render(prompt, model, tokenizer, chat_format) for prompt in seed_prompts()]
    observed, held_out = split(prompts)
    longest = max(map(len, prompts)) + CONTINUATION
    return Corpus(
        name="edgekv seed prompts, continued by the model",
        observed=SelfGenerated(tuple(observed), model.spec.eos_ids, options.tokens, options.seed),
        held_out=SelfGenerated(tuple(held_out), model.spec.eos_ids, options.held_out_tokens, options.seed + 1),
        capacity=_whole_slots(longest),
    )


def from_files(
    model: Description, tokenizer: Tokenizer, chat_format: ChatFormat | None, options: CalibrateOptions
) -> Corpus:
    """Excerpts of the UTF-8 text files in `options.data`, spread evenly over all of the text.

    Raises:
        InvalidOption: a file is missing, empty or no UTF-8, or there are too few tokens in all.
    """
    text = "\n".join(read_text(path) for path in options.data)
    first = _bos(model) if chat_format is None else _render(seed_prompts()[0], model, tokenizer, chat_format)[:1]
    lengths = excerpt_lengths(options, min(SEQUENCE, model.spec.max_context) - len(first))
    excerpts = cut(text, tokenizer, lengths)
    found, wanted = sum(map(len, excerpts)), sum(lengths)
    if found < wanted:
        raise InvalidOption(
            f"{', '.join(map(str, options.data))}: about {found:,} tokens of text, but calibration takes {wanted:,} "
            f"({options.tokens:,} to observe, the others to check the scales with): add text, or ask for fewer tokens."
        )
    observed, held_out = split([(*first, *excerpt) for excerpt in excerpts])
    return Corpus(
        name=", ".join(path.name for path in options.data),
        observed=Excerpts(tuple(observed)),
        held_out=Excerpts(tuple(held_out)),
        capacity=_whole_slots(max(lengths) + len(first)),
    )


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """What is observed and what is held out."""
    observed = [item for index, item in enumerate(items) if index % HELD_OUT_EVERY]
    return observed, list(items[::HELD_OUT_EVERY])


def read_text(path: Path) -> str:
    """A text file's content.

    Raises:
        InvalidOption: it is missing, empty or no UTF-8.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidOption(
            f"{path} is not UTF-8 text (byte {error.start:,} does not fit): convert it first."
        ) from None
    except OSError as error:
        raise InvalidOption(f"The text {path} could not be read: {error.strerror}.") from None
    if not text.strip():
        raise InvalidOption(f"{path} holds no text: calibration needs some thousand tokens of it.")
    return text


def excerpt_lengths(options: CalibrateOptions, longest: int) -> list[int]:
    """How many tokens each excerpt has, in the order that `split` expects: at least two held out, twelve observed."""
    groups = max(2, -(-options.tokens // ((HELD_OUT_EVERY - 1) * longest)), -(-options.held_out_tokens // longest))
    observed = -(-options.tokens // (groups * (HELD_OUT_EVERY - 1)))
    held_out = -(-options.held_out_tokens // groups)
    return [observed if index % HELD_OUT_EVERY else held_out for index in range(groups * HELD_OUT_EVERY)]


def cut(text: str, tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Share the text out in proportion to the lengths, and take so many tokens from the beginning of each part.

    Parts do not overlap. An excerpt is shorter than its length only where its whole part is.
    """
    borders = [0, *(len(text) * done // sum(lengths) for done in accumulate(lengths))]
    parts = zip(pairwise(borders), lengths, strict=True)
    return [_first_tokens(text[start:stop], tokenizer, length) for (start, stop), length in parts]


def _first_tokens(text: str, tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of a text, without reading all of a long one."""
    chars = count * _FIRST_GUESS_CHARS
    while True:
        ids = tokenizer.encode(text[:chars])
        if len(ids) >= count or chars >= len(text):
            return ids[:count]
        chars *= 4


def _render(prompt: str, model: Description, tokenizer: Tokenizer, chat_format: ChatFormat | None) -> tuple[int, ...]:
    """A prompt as a session would run it first."""
    if chat_format is not None:
        return chat_format.encode(chat_format.prompt([Message(role="user", content=prompt)]).text).ids
    return (*_bos(model), *tokenizer.encode(prompt))


def _bos(model: Description) -> tuple[int, ...]:
    """What the model's tokenizer puts before plain text."""
    return (model.spec.bos_id,) if model.add_bos and model.spec.bos_id is not None else ()


def _whole_slots(tokens: int) -> int:
    """A capacity: the next multiple of the smallest one."""
    return -(-tokens // MIN_CAPACITY) * MIN_CAPACITY
