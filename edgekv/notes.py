"""overflow="summarise": before turns leave, the model condenses them into a note, which is pinned in their place.

    prompt     system prompt + note | turns that are still whole | the question
    the note   what the user stated, word for word, and what the model notes down, half of it each: together at most
               an eighth of the cache, and no more than system prompt and note together may pin (a quarter)

When a question and its answer would not fit, the oldest turns up to a question's border are condensed, as many as leave
the rest in half of the cache: the model is asked, greedily, behind exactly these turns. They are cached, so only the
request is read. Then the note goes into the system prompt, where no eviction reaches it, and the turns that stay are
read again behind it. A note takes up the one before it, which stands in the system prompt that the model sees.

Why word for word: a small model asked for a note often says one of its answers again, or nothing in particular, and
what the user told it would be lost (seen with the default model, 30 turns in 512 tokens). So the user's statements, the
newest that fit, come first; and what the model says is left out if most of its runs of four words stand in its answers.

An answer gets the room that is left and ends with "length" where that ends: nothing leaves that no note is about. The
words themselves are kept by the session (and its file); an undo that reaches behind a note drops the note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgekv.errors import ContextOverflow
from edgekv.sampling import SamplingOptions
from edgekv.text.precheck import LengthReport
from edgekv.text.template import Message
from edgekv.text.tokenizer import Tokenizer

HEADING = "Note on the conversation before this point:"
REQUEST = (
    "Write a note for yourself, of at most {words} words, on our conversation so far: names, facts, what was decided, "
    "what is still open. Write the note and nothing else."
)
OWN_WORDS = "The user said:"
LEAST_TOKENS = 16
"""A note shorter than this is of no use, so a system prompt that leaves no more is refused."""

_COPIED = 0.6  # of a note's runs of words, from which on it is no note
_RUN_WORDS = 4
_STATEMENT_WORDS = 24  # of a longer one the beginning is kept
_WORDS_PER_TOKEN = 0.6  # so that a note that keeps to the words keeps to the tokens, in most languages

Measure = Callable[[Sequence[Message]], LengthReport]
"""What these messages would be as a prompt."""


@dataclass(frozen=True)
class Notepad:
    """What a session has noted down: the note, and how many messages after the system prompt it is about."""

    note: str = ""
    noted: int = 0

    def view(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the model sees them: those that are noted down are in the system prompt."""
        lead = _lead(messages)
        system = [message["content"] for message in messages[:lead]] + (
            [f"{HEADING}\n{self.note}"] if self.note else []
        )
        beginning = [Message(role="system", content="\n\n".join(system))] if system else []
        return [*beginning, *messages[lead + self.noted :]]

    def without(self, messages: Sequence[Message]) -> Notepad:
        """What is left when only these messages are: nothing, if some that are noted down were taken back."""
        return self if len(messages) >= _lead(messages) + self.noted else Notepad()


@dataclass(frozen=True)
class Task:
    """One note to be made."""

    messages: list[Message]  # what the model is asked
    sampling: SamplingOptions
    limit: int  # tokens of the note
    noted: int  # messages after the system prompt that it will be about
    about: Sequence[Message] = ()  # these

    def result(self, text: str, tokenizer: Tokenizer) -> Notepad:
        """The note; the model's part of it is cut to its limit if its text gives more tokens than were generated."""
        repeated = self._repeats_answers(text)
        own = self._own_words(tokenizer, self.limit if repeated else self.limit - self.limit // 2)
        told = "" if repeated and own else text.strip()
        note = "\n".join(filter(None, (own, told)))
        ids = tokenizer.encode(note)
        cut = tokenizer.decode(ids[: self.limit]).rstrip("\ufffd")  # half a character would be several tokens again
        return Notepad(note if len(ids) <= self.limit else cut, self.noted)

    def _repeats_answers(self, text: str) -> bool:
        said = {run for message in self.about if message["role"] == "assistant" for run in _runs(message["content"])}
        runs = _runs(text)
        return sum(run in said for run in runs) > _COPIED * len(runs)

    def _own_words(self, tokenizer: Tokenizer, limit: int) -> str:
        """What the user stated, the newest that fit; questions are left out. Empty: nothing fits, or was stated."""
        kept: list[str] = []
        for message in reversed(self.about):
            words = message["content"].split()
            if message["role"] != "user" or not words or words[-1].endswith(("?", "？")):
                continue
            line = " ".join(words[:_STATEMENT_WORDS]) + (" ..." if len(words) > _STATEMENT_WORDS else "")
            if len(tokenizer.encode("\n".join([OWN_WORDS, line, *kept]))) > limit:
                break
            kept.insert(0, line)
        return "\n".join([OWN_WORDS, *kept]) if kept else ""


def next_task(pad: Notepad, messages: Sequence[Message], measure: Measure) -> Task:
    """Which turns to note down next, so that the last message (the question) has room.

    Raises:
        ContextOverflow: the system prompt leaves no room for a note, or the question alone is too long.
    """
    limit = _limit(messages[: _lead(messages)], measure)
    first = _lead(messages) + pad.noted
    borders = [index for index in range(first + 1, len(messages)) if messages[index]["role"] == "user"]
    capacity = measure(messages[-1:]).capacity
    if not borders:
        report = measure(pad.view(messages))
        found = report.input_tokens
        raise ContextOverflow(
            f"The prompt is {found} tokens and there is nothing left to note down, but the cache holds {capacity}: "
            f"shorten the message, or {report.more_room}.",
            input_tokens=found,
            max_allowed=capacity - 1,
        )
    room = capacity // 2 - limit
    lead = messages[: _lead(messages)]
    enough = (at for at in borders if measure([*lead, *messages[at:]]).input_tokens <= room)
    cut = next(enough, borders[-1])
    while True:
        asked = [*pad.view(messages[:cut]), _request(limit)]
        left = capacity - measure(asked).input_tokens
        if left >= limit or cut == borders[0]:
            most = max(1, min(limit // 2, left))
            sampling = SamplingOptions(temperature=0.0, repetition_penalty=1.1, max_new_tokens=most)
            about = messages[_lead(messages) : cut]
            return Task(asked, sampling, limit, len(about), about)
        cut = borders[borders.index(cut) - 1]


def _runs(text: str) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[at : at + _RUN_WORDS]) for at in range(len(words) - _RUN_WORDS + 1)]


def _request(limit: int) -> Message:
    return Message(role="user", content=REQUEST.format(words=int(limit // 2 * _WORDS_PER_TOKEN)))


def _limit(lead: Sequence[Message], measure: Measure) -> int:
    """Tokens that a note may have beside the system prompt."""
    question = Message(role="user", content="?")
    report = measure([Message(role="system", content="\n\n".join([*(m["content"] for m in lead), HEADING])), question])
    most = report.capacity // 4
    limit = min(report.capacity // 8, most - report.pinned - 2)  # tokens may be other ones where two texts meet
    if limit < LEAST_TOKENS:
        raise ContextOverflow(
            f"The system prompt is {report.pinned} tokens with a note's heading, but at most {most} (a quarter of the "
            f"cache) can be kept for good, and a note needs {LEAST_TOKENS} of them: shorten it, or {report.more_room}.",
            input_tokens=report.pinned,
            max_allowed=most - LEAST_TOKENS - 2,
        )
    return limit


def _lead(messages: Sequence[Message]) -> int:
    """How many messages at the beginning are the system prompt."""
    return int(bool(messages) and messages[0]["role"] == "system")
