"""`kill -9` at any moment loses at most the current answer: the last saved state comes back, whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import killed_chat
from helpers.chat import make_chat_model

import edgekv
from edgekv.generate import TextDelta
from edgekv.session import Session
from edgekv.session_file import read_info
from edgekv.session_store import SessionStore

QUESTIONS = [f"This is question {number}, please answer it." for number in range(9)]
OPTIONS = {"context": 192, "memory": "4GiB", "threads": 1, "overflow": "window"}
SAMPLING = {"max_new_tokens": 6, "temperature": 1.0, "seed": 7}
SYSTEM = "Be brief."

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")


def ask(session: Session, text: str) -> str:
    return "".join(event.text for event in session.send(text) if isinstance(event, TextDelta))


@dataclass
class World:
    """A model, what a chat that nobody kills holds and says turn by turn, and a runtime to restore into."""

    folder: Path
    runtime: edgekv.Runtime
    tokens: list[list[int]] = field(default_factory=list)  # after so many turns
    answers: list[str] = field(default_factory=list)

    def session(self) -> Session:
        return self.runtime.session(system=SYSTEM, **SAMPLING)

    def learn(self) -> None:
        session = self.session()
        for question in QUESTIONS:
            self.tokens.append(self.runtime.chat_state.timeline.tokens)
            self.answers.append(ask(session, question))
        assert self.runtime.chat_state.timeline.window.evicted > 3 * 24, "the chat does not get as far as evictions"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))
    with edgekv.load(model.folder, **OPTIONS) as runtime:
        world = World(model.folder, runtime)
        world.learn()
        yield world


@dataclass(frozen=True)
class Death:
    """Where a process is killed: in which phase, after how many saves, how far into the phase."""

    phase: str
    after: int
    delay_s: float

    @classmethod
    def drawn(cls, seed: int) -> Death:
        """Every phase in turn; the moment at random."""
        chance = random.Random(seed)
        phase = killed_chat.PHASES[seed % len(killed_chat.PHASES)]
        after = chance.randint(6, 7) if phase == "evict" else chance.randint(1, 7)
        return cls(phase, after, chance.choice((0.0, chance.uniform(0, 0.004))))


def chat_until_killed(world: World, death: Death, home: Path) -> list[tuple[str, int]]:
    """Runs the chat; gives (SHA-256, messages) of every save that returned."""
    report = home / "report"
    report.touch()
    options = {name: value for name, value in (OPTIONS | SAMPLING).items() if name != "overflow"}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    where = [str(report), death.phase, str(death.after), str(death.delay_s)]
    arguments = ["chat", str(world.folder), "--session", "talk", "--home", str(home), "--system", SYSTEM, *flags]
    done = subprocess.run(
        [sys.executable, killed_chat.__file__, *where, *arguments],
        input="\n".join(QUESTIONS) + "\n", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    return [(line.split()[0], int(line.split()[1])) for line in report.read_text().splitlines()]


def check_restored(world: World, death: Death, home: Path) -> None:
    """Kill a chat, restore it here: the last saved state, its checksum, its tokens, its question; then it goes on."""
    saves = chat_until_killed(world, death, home)
    assert len(saves) >= death.after
    with SessionStore(home).open("talk") as saved:
        assert [path.name for path in saved.path.parent.iterdir() if path.suffix == ".part"] == []
        session = world.session()
        session.load(saved.path)
        turns = len(session.messages) // 2
        known = dict(saves)
        sha256 = read_info(saved.path).sha256
        if sha256 in known:
            assert (sha256, len(session.messages)) == saves[-1]
        else:
            assert death.phase not in ("prefill", "decode", "evict")
            assert turns == len(saves) + 1, "renamed into place, and killed before it could say so"
        assert world.runtime.chat_state.timeline.tokens == world.tokens[turns]
        at_rest = [""] if death.delay_s else []  # time enough to finish the save, and no question read yet
        question = saved.question
        assert question.text in (QUESTIONS[turns], QUESTIONS[turns - 1], *at_rest)
        assert question.is_open(2 * turns) == (question.text == QUESTIONS[turns])
        if death.phase in ("prefill", "decode", "evict"):
            assert question.text == QUESTIONS[turns]
        assert ask(session, QUESTIONS[turns]) == world.answers[turns]


@pytest.mark.parametrize("seed", range(len(killed_chat.PHASES)))
def test_killed(world: World, tmp_path: Path, seed: int) -> None:
    """Once in each phase: prefill, decode, eviction, and four places of a save."""
    check_restored(world, Death.drawn(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_killed_200_times(world: World, tmp_path: Path, seed: int) -> None:
    """The same 200 times, at other moments."""
    check_restored(world, Death.drawn(seed), tmp_path)
