"""What a person waits for in a long chat: `python scripts/conversation_times.py`, where edgekv is installed.

    first token    from Enter to the first text of the answer, at turn 2 and at turn 50, for the same new text: length
                   check, rendering and tokenising the history, reading what is new, evicting. Two conversations, one
                   behind a turn and one behind 49, are asked the same in turn, and the answers taken back, so that both
                   meet the same machine; medians, and the ratio
    preparing      from a message to its prompt's text behind so many turns: the model's template is run over the whole
                   conversation, once. Beside it, what running the template takes alone
    restore        loading a saved session (its hash checked, its rows copied) beside reading the same tokens
    save           what writing the session after an answer takes, and its size

Times mean something on an idle machine only; on a busy one `--cpu-time` counts this process's own time instead, which
leaves out the disk's, on one thread. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import edgekv
from edgekv.api import open_text
from edgekv.calibrate.corpus import seed_prompts
from edgekv.options import home_of
from edgekv.prepare import prepare
from edgekv.text.template import Message

SYSTEM = "You are a helpful assistant. Answer in one or two sentences."
QUESTION = "What would you take along on a long walk in the hills, and why?"
EARLY, LATE = 2, 50
"""The turns that are compared."""
ANSWER_TOKENS = 24
PAIRS = 7
"""Questions a round, each to both."""
PAUSE_S = 0.2
"""Before a question: the threads of the other conversation's runtime wait for work at full speed for a while."""
clock = time.perf_counter
LIMIT = 1.3
"""Issue: the first token of turn 50 within 1.3 times that of turn 2."""


@dataclass(frozen=True)
class FirstToken:
    """Medians of one capacity, in milliseconds."""

    capacity: int
    early_ms: float
    late_ms: float
    evicted: int  # tokens that had left by the last turn

    @property
    def ratio(self) -> float:
        """Late over early."""
        return self.late_ms / self.early_ms


@dataclass(frozen=True)
class Restored:
    """One length, in milliseconds."""

    tokens: int
    prefill_ms: float
    restore_ms: float
    save_ms: float
    size_bytes: int


def first_token(model: str, capacity: int, rounds: int, threads: int) -> FirstToken:
    """The same questions at both turns, in caches of this capacity."""
    times: dict[int, list[float]] = {EARLY: [], LATE: []}
    with ExitStack() as stack:
        runtimes = {turn: stack.enter_context(edgekv.load(model, context=capacity, threads=threads)) for turn in times}
        sessions = {turn: _behind(turn - 1, runtime) for turn, runtime in runtimes.items()}
        for number in range(PAIRS * rounds):
            for turn, session in sessions.items():
                time.sleep(PAUSE_S)
                times[turn].append(_ask(session, f"{10 + number}: {QUESTION}"))  # nothing of the last one serves again
                session.undo()
        evicted = runtimes[LATE].chat_state.timeline.engine.evicted
    return FirstToken(capacity, *(_median_ms(times[turn]) for turn in (EARLY, LATE)), evicted)


def _behind(turns: int, runtime: edgekv.Runtime) -> edgekv.Session:
    """A conversation that has had so many turns."""
    session = runtime.session(system=SYSTEM, overflow="window", temperature=0.0, max_new_tokens=ANSWER_TOKENS)
    for text in _questions(turns):
        _ask(session, text)
    return session


def restored(model: str, lengths: Sequence[int], rounds: int, threads: int) -> list[Restored]:
    """Reading, saving and restoring prompts of about these lengths, each once a round."""
    with edgekv.load(model, threads=threads) as runtime, tempfile.TemporaryDirectory() as folder:
        return [_restored(runtime, length, rounds, Path(folder) / "session.safetensors") for length in lengths]


def _restored(runtime: edgekv.Runtime, length: int, rounds: int, path: Path) -> Restored:
    prefill, save, restore = [], [], []
    for number in range(rounds):
        text = (
            f"{number}. {_text_of(runtime, length)}"  # another one each time: rows of a waiting session are used again
        )
        session = runtime.session(temperature=0.0, max_new_tokens=1)
        runtime.chat_state.reset()
        prefill.append(_timed(lambda session=session, text=text: list(session.send(text))))
        save.append(_timed(lambda session=session: session.save(path)))
        session.reset()
        restore.append(_timed(lambda session=session: session.load(path)))
    tokens = runtime.chat_state.timeline.window.length
    return Restored(tokens, *map(_median_ms, (prefill, restore, save)), path.stat().st_size)


def _ask(session: edgekv.Session, text: str) -> float:
    """Send a text as `edgekv chat` does; seconds until the first text of the answer."""
    started = clock()
    session.precheck(text).require()
    waited = 0.0
    for event in session.send(text):
        if isinstance(event, edgekv.TextDelta) and not waited:
            waited = clock() - started
    return waited


@dataclass(frozen=True)
class Prepared:
    """Medians behind one number of turns, in milliseconds."""

    turns: int
    prompt_ms: float
    template_ms: float


def prepared(model: str, turns: int, rounds: int) -> Prepared:
    """What a message's prompt takes behind `turns` turns of about 80 tokens."""
    _, chat_format = open_text(prepare(model, home=home_of(edgekv.LoadOptions())))
    if chat_format is None:
        raise SystemExit(f"{model} has no chat template.")
    words = "\n".join(seed_prompts()).split()
    messages, times, template_times = [], [], []
    for turn in range(turns + rounds):
        said = [" ".join(words[(turn * 72 + at) % len(words) :][:count]) for at, count in ((0, 12), (12, 60))]
        messages.append(Message(role="user", content=said[0]))
        if turn >= turns - 1:
            times.append(_timed(lambda: chat_format.prompt(messages)))
            template_times.append(_timed(lambda: chat_format.template.render(messages)))
        messages.append(Message(role="assistant", content=said[1]))
    return Prepared(turns, _median_ms(times[1:]), _median_ms(template_times[1:]))  # the first knows no turn yet


def _questions(count: int) -> Iterable[str]:
    prompts = seed_prompts()
    return (" ".join(prompts[index % len(prompts)].split()[:24]) for index in range(count))


def _text_of(runtime: edgekv.Runtime, length: int) -> str:
    """Shipped text, repeated, that becomes a prompt of at most this many tokens with an answer."""
    tokenizer = runtime.chat_state.tokenizer
    ids = tokenizer.encode("\n".join(seed_prompts()))
    overhead = runtime.session().precheck("").input_tokens + 12
    return tokenizer.decode((ids * (length // len(ids) + 1))[: length - overhead])


def _timed(action: Callable[[], object]) -> float:
    started = clock()
    action()
    return clock() - started


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def main() -> int:
    """Measure and print; 1 if turn 50 takes too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--capacities", type=int, nargs="*", default=[512, 1024, 4096])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--turns", type=int, nargs="*", default=[50, 200, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count this process's own time, on one thread")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock, options.threads = time.process_time, 1
    prompts = []
    for count in options.turns:
        prompts.append(prepared(options.model, count, options.rounds))
        times = "a prompt is prepared in {0.prompt_ms:.1f} ms, of which the template takes {0.template_ms:.1f} ms"
        print(f"turn {count}: {times}".format(prompts[-1]), flush=True)
    turns, lengths = [], []
    for capacity in options.capacities:
        turns.append(first_token(options.model, capacity, options.rounds, options.threads))
        print(
            "capacity {0.capacity}: first token at turn 2 {0.early_ms:.0f} ms, at turn 50 {0.late_ms:.0f} ms "
            "({0.ratio:.2f}x), {0.evicted} tokens evicted".format(turns[-1]),
            flush=True,
        )
    for found in restored(options.model, options.lengths, options.rounds, options.threads):
        lengths.append(found)
        times = f"read in {found.prefill_ms:.0f} ms, restored in {found.restore_ms:.0f} ms"
        print(f"{found.tokens} tokens: {times}, saved in {found.save_ms:.0f} ms ({found.size_bytes} bytes)", flush=True)
    figures = {"prompts": prompts, "turns": turns, "lengths": lengths}
    print(json.dumps({name: [asdict(found) for found in of_one] for name, of_one in figures.items()}))
    return 1 if any(found.ratio > LIMIT for found in turns) else 0


if __name__ == "__main__":
    sys.exit(main())
