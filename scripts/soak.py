"""Talk without end through a small window: `python scripts/soak.py --tokens 100000`, where edgekv is installed.

One conversation through the whole product (session, template, length check, evictions, sampling) until so many tokens
have been generated. Reported, and judged at the end (exit code 1 if one fails):

    memory    resident size after each answer, on Linux without mapped files (new words make more pages of the embedding
              resident): highest over lowest, once the window has filled; at most 1 % more
    speed     decoding beside the same program started at that moment, its window filled, answer by answer in turn, at
              each tenth of the run: at most 10 % less. The slowest tenth over the fastest is told, too, but says as
              much of the machine: on one whose processors were shared it was 0.96, 0.89 and 0.72 (2026-11-30)
    numbers   every hidden state and logit is checked by the engine; one that is not finite ends the run
    probe     perplexity of a text that edgekv ships: on the emptied cache, before and after, the same; and as what
              follows the conversation, at each tenth of the run, over that where the same tokens have just been read
              into an empty cache: the later half's median at most 1.05

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

import edgekv
from edgekv.calibrate.corpus import seed_prompts
from edgekv.engines.base import Engine
from edgekv.evaluate import stream_loss, token_losses
from edgekv.kv.window import Move

PROMPTS = (
    "Tell me about the sea and what lives at its bottom.",
    "Write a short story about a lighthouse keeper.",
    "How does a bicycle stay upright?",
    "Explain what a prime number is, with examples.",
    "What should I cook tonight with rice, eggs and leeks?",
    "Describe a walk through a city in the rain.",
    "Why is the sky blue, and red in the evening?",
    "Give me a plan for learning to play the piano.",
)
PROBE_TOKENS = 512
ANSWER_TOKENS = 256
PROBES = 10
PAIRS = 5
"""Answers of this program and of a fresh one that are compared at each probe."""
SETTLED_ANSWERS = 8
"""Answers after which the window is full and buffers have their size: memory is compared from there on."""
MEMORY_LIMIT, SPEED_LIMIT, PROBE_LIMIT = 1.01, 0.9, 1.05


@dataclass(frozen=True)
class Answer:
    """What one answer took."""

    tokens: int
    tokens_per_s: float
    resident_bytes: int


@dataclass(frozen=True)
class Report:
    """The figures of a run."""

    generated_tokens: int
    evicted_tokens: int
    answers: int
    seconds: float
    memory_ratio: float  # highest over lowest resident size
    speed_ratio: float  # slowest tenth over fastest tenth, the machine's own changes in it
    beside: list[float]  # speed over that of a program just started, at each probe
    probe_before: float  # perplexity
    probe_after: float
    following: list[float]  # perplexity of the probe after the conversation over that after the same tokens read afresh

    @property
    def failures(self) -> list[str]:
        """What does not hold."""
        aged, slowest = statistics.median(self.following[len(self.following) // 2 :]), min(self.beside, default=1.0)
        checks = {
            f"memory grew by {self.memory_ratio - 1:.2%} (limit 1 %)": self.memory_ratio <= MEMORY_LIMIT,
            f"decoding fell to {slowest:.2f} of a fresh program's (limit 0.9)": slowest >= SPEED_LIMIT,
            f"the probe went from {self.probe_before} to {self.probe_after}": self.probe_before == self.probe_after,
            f"the aged cache foretells {aged - 1:.2%} worse than one read afresh (limit 5 %)": aged <= PROBE_LIMIT,
        }
        return [text for text, holds in checks.items() if not holds]


Speed = Callable[[], float]
"""Has one more answer made, and returns its tokens per second."""


def soak(
    runtime: edgekv.Runtime, tokens: int, fresh: Callable[[], AbstractContextManager[Speed]] | None = None
) -> Report:
    """Run until `tokens` have been generated. fresh: starts the program that speeds are compared with."""
    started = time.monotonic()
    before = probe(runtime)
    answers: list[Answer] = []
    following: list[float] = []
    beside: list[float] = []
    talk = conversation(runtime)

    def another() -> float:
        answers.append(next(talk))
        return answers[-1].tokens_per_s

    for answer in talk:
        answers.append(answer)
        done = sum(each.tokens for each in answers)
        print(f"\r{done} of {tokens} tokens, {answer.tokens_per_s:.0f}/s ", end="", file=sys.stderr, flush=True)
        if done >= (len(following) + 1) * tokens / PROBES:
            following.append(probe_following(runtime))
            if fresh is not None:
                with fresh() as other:
                    beside.append(compared(another, other))
        if done >= tokens:
            break
    evicted = runtime.chat_state.timeline.engine.evicted
    sizes = [answer.resident_bytes for answer in answers[SETTLED_ANSWERS:] or answers[-1:]]
    return Report(
        generated_tokens=sum(answer.tokens for answer in answers),
        evicted_tokens=evicted,
        answers=len(answers),
        seconds=time.monotonic() - started,
        memory_ratio=max(sizes) / min(sizes),
        speed_ratio=speed_ratio([answer.tokens_per_s for answer in answers[SETTLED_ANSWERS:] if answer.tokens > 16]),
        beside=beside,
        probe_before=before,
        probe_after=probe(runtime),
        following=following,
    )


def compared(own: Speed, other: Speed) -> float:
    """Own speed over the mean of the other's before and after it, the median of some answers in turn."""
    others, ratios = [other()], []
    for _ in range(PAIRS):
        speed = own()
        others.append(other())
        ratios.append(speed / statistics.mean(others[-2:]))
    return statistics.median(ratios)


@contextmanager
def fresh_program(arguments: Sequence[str]) -> Iterator[Speed]:
    """This script in a process of its own, which makes an answer whenever it is asked (`--on-demand`)."""
    command = [sys.executable, __file__, *arguments, "--on-demand"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, speeds = process.stdin, process.stdout

        def speed() -> float:
            requests.write("\n")
            requests.flush()
            return float(speeds.readline())

        yield speed  # at the end its stdin is closed, and it with it


def answer_on_demand(runtime: edgekv.Runtime) -> None:
    """For each line of stdin the speed of one answer, once the window is full."""
    talk = conversation(runtime)
    while runtime.chat_state.timeline.engine.evicted == 0:
        next(talk)
    for _ in sys.stdin:
        print(next(talk).tokens_per_s, flush=True)


def conversation(runtime: edgekv.Runtime) -> Iterator[Answer]:
    """Answers without end, each with a seed of its own."""
    session = runtime.session(overflow="window", temperature=0.8, max_new_tokens=ANSWER_TOKENS)
    process = psutil.Process()
    for turn, prompt in enumerate(itertools.cycle(PROMPTS)):
        session.sampling = edgekv.SamplingOptions(temperature=0.8, max_new_tokens=ANSWER_TOKENS, seed=turn)
        for event in session.send(prompt):
            if isinstance(event, edgekv.Finished):
                usage = event.usage
                memory = process.memory_info()
                own_bytes = memory.rss - getattr(memory, "shared", 0)
                yield Answer(usage.output_tokens, usage.tokens_per_s, own_bytes)


def probe(runtime: edgekv.Runtime) -> float:
    """Perplexity of the shipped text on an empty cache."""
    chat = runtime.chat_state
    chat.reset()
    perplexity = stream_loss(chat.timeline, probe_ids(runtime)).perplexity
    chat.reset()
    return perplexity


def probe_following(runtime: edgekv.Runtime) -> float:
    """Perplexity of the shipped text on the cache as it has become, over that on its tokens read afresh.

    Both follow the same words, so what the conversation happens to be about cancels out. It is left as it was.
    """
    timeline, ids = runtime.chat_state.timeline, probe_ids(runtime)
    engine, state = timeline.engine, timeline.engine.save()
    if (lacking := len(ids) - (engine.kv.capacity - engine.length)) > 0:
        engine.evict(Move(timeline.pinned, lacking, engine.length))
    held = list(engine.tokens)
    aged = _mean_loss(engine, ids)
    engine.reset()
    engine.forward(held)
    fresh = _mean_loss(engine, ids)
    engine.load(state)
    return math.exp(aged - fresh)


def _mean_loss(engine: Engine, ids: Sequence[int]) -> float:
    """Nats a token of what comes next."""
    return float(token_losses(engine.forward(ids[:-1], all_logits=True), ids[1:]).mean())


def probe_ids(runtime: edgekv.Runtime) -> list[int]:
    """The shipped text's first tokens."""
    chat = runtime.chat_state
    count = min(PROBE_TOKENS, chat.timeline.engine.kv.capacity // 2)
    return chat.tokenizer.encode("\n".join(seed_prompts()))[:count]


def speed_ratio(speeds: Sequence[float]) -> float:
    """Median of the slowest tenth of the run over that of the fastest."""
    size = max(len(speeds) // 10, 1)
    medians = [statistics.median(speeds[i : i + size]) for i in range(0, len(speeds) - size + 1, size)]
    return min(medians) / max(medians) if medians else 1.0


def main() -> int:
    """Run, print the figures, and say what does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here too")
    parser.add_argument("--on-demand", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with edgekv.load(
        options.model, context=options.capacity, kv_dtype=options.kv_dtype, threads=options.threads
    ) as runtime:
        if options.on_demand:
            answer_on_demand(runtime)
            return 0
        report = soak(runtime, options.tokens, partial(fresh_program, sys.argv[1:]))
    print(file=sys.stderr)
    for failure in report.failures:
        print(f"FAILED: {failure}")
    line = json.dumps(asdict(report))
    print(line)
    if options.json:
        options.json.write_text(line)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
