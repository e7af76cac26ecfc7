"""Answers that are cut anywhere, also inside a character: what is shown is whole, and remembered, and in the cache.

The engine says random tokens: bytes that are characters, that are none, and parts of them. One tokenizer has a token
for each byte of a character in its own spelling, the other the byte tokens of SentencePiece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.chat import TEMPLATE
from helpers.fake_engine import FakeEngine, fake_spec
from helpers.pieces import pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.chat import Chat
from edgekv.generate import Finished, TextDelta
from edgekv.kv.spec import KVSpec
from edgekv.sampling import SamplingOptions
from edgekv.session import Session
from edgekv.session_file import CacheIdentity
from edgekv.text.prompt import ChatFormat
from edgekv.text.template import ChatTemplate
from edgekv.text.tokenizer import Tokenizer

SAID = "a 👨‍👩‍👧‍👦好é\ufffdb"


@dataclass(frozen=True)
class Talker:
    """A tokenizer, and how it spells bytes."""

    tokenizer: Tokenizer
    eos: int
    spelled: Callable[[bytes], list[int]]

    def session(self, answer_ids: Sequence[int] | None, capacity: int = 1024) -> tuple[Session, FakeEngine]:
        spec = fake_spec(vocab_size=self.tokenizer.vocab_size, eos_ids=(self.eos,))
        engine = FakeEngine(KVSpec(capacity, sinks=4, stride=16), spec, answer_ids)
        template = ChatTemplate(TEMPLATE.replace("</s>", "<s>"), bos_token="<s>", eos_token="</s>")
        chat = Chat(engine, self.tokenizer, ChatFormat(self.tokenizer, template), identity=IDENTITY)
        return Session(chat, sampling=SamplingOptions(temperature=0.0)), engine


def spelled_as_gpt2(tokenizer: Tokenizer) -> Callable[[bytes], list[int]]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return lambda data: [number for byte in data if (number := tokenizer.token_id(names[byte])) is not None]


IDENTITY = CacheIdentity("0" * 16, "fake", "float", "channel", "")
GPT2 = Tokenizer.from_file(Path(__file__).parents[1] / "data" / "llama-fp16" / "tokenizer.json")
TALKERS = {
    "gpt2": Talker(GPT2, 2, spelled_as_gpt2(GPT2)),
    "pieces": Talker(Tokenizer(pieces()), 265, list),
}
BYTES = st.binary(max_size=6) | st.sampled_from([b"a", b" ", b"\xef\xbf\xbd", *(c.encode() for c in "👨‍好é")])
SAYING = st.lists(BYTES, min_size=1, max_size=8).map(b"".join) | st.just(SAID.encode())


def talk(session: Session, text: str, sampling: SamplingOptions, events: int = 10_000) -> tuple[str, Finished | None]:
    """Send a text, and stop after so many events; the text given out, and the end if it came to that."""
    shown, stream = "", session.send(text, sampling)
    for count, event in enumerate(stream, 1):
        shown += event.text if isinstance(event, TextDelta) else ""
        if isinstance(event, Finished):
            return shown, event
        if count == events:
            break
    stream.close()
    return shown, None


def check_kept(talker: Talker, session: Session, engine: FakeEngine, shown: str) -> None:
    """What was shown is whole and remembered, the cache holds tokens of it and of nothing else, and the next message
    reads no more than what is new."""
    assert not shown.endswith("\ufffd")
    if not session.messages:
        assert not shown, "it was stopped before anything was shown"
        return
    assert session.messages[-1] == {"role": "assistant", "content": shown}
    held = session._chat.timeline.tokens
    engine.answer_ids = []
    _, finished = talk(session, "b", SamplingOptions(temperature=0.0))
    assert finished is not None
    assert finished.usage.reused_tokens == len(held), "all that the cache held is used again"
    read = session._chat.timeline.tokens
    assert read[: len(held)] == held
    assert said_in(talker, read) == shown


def said_in(talker: Talker, tokens: Sequence[int]) -> str:
    """The first answer in a cache's tokens, between the control tokens around it: each turn is <s>...<s>."""
    control = talker.tokenizer.token_id("<s>")
    *_, start, end = [index for index, token in enumerate(tokens) if token == control][:4]
    header = len(talker.tokenizer.encode("assistant\n"))
    return talker.tokenizer.decode(tokens[start + 1 + header : end])  # alone: a space at the beginning may be left out


@pytest.mark.parametrize("name", TALKERS)
@settings(max_examples=150, deadline=None)
@given(SAYING, st.integers(1, 30), st.integers(1, 40), st.sampled_from([(), ("a",), ("好",), ("b c",)]))
def test_cut_anywhere(name: str, saying: bytes, most: int, events: int, stop: tuple[str, ...]) -> None:
    """By the number of tokens, by whoever listens, by a stop string, by the end of what there is to say."""
    talker = TALKERS[name]
    session, engine = talker.session(talker.spelled(saying))
    shown, finished = talk(session, "ab", SamplingOptions(temperature=0.0, max_new_tokens=most, stop=stop), events)
    if finished is not None:
        assert finished.text == shown
    check_kept(talker, session, engine, shown)


@pytest.mark.parametrize("name", TALKERS)
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 60))
def test_random_tokens_through_a_small_cache(name: str, seed: int, most: int) -> None:
    """An engine that says whatever comes, turn after turn, past what the cache holds."""
    talker = TALKERS[name]
    session, _ = talker.session(None, capacity=256)
    for turn in range(9):
        sampling = SamplingOptions(temperature=1.0, seed=seed + turn, max_new_tokens=most)
        shown, finished = talk(session, "ab", sampling)
        assert finished is not None
        assert not shown.endswith("\ufffd")
        assert session.messages[-1]["content"] == finished.text == shown
        held = session._chat.timeline.tokens
        assert shown.startswith(talker.tokenizer.decode(held[finished.usage.input_tokens :]))
        assert len(held) >= finished.usage.input_tokens, "the prompt stays"


@pytest.mark.parametrize("name", TALKERS)
@pytest.mark.parametrize("most", range(1, len(SAID.encode()) + 1))
def test_retried_and_restored(name: str, most: int, tmp_path: Path) -> None:
    """Asked again it is answered the same; a saved session goes on as if it had never stopped."""
    talker = TALKERS[name]
    session, engine = talker.session(talker.spelled(SAID.encode()))
    sampling = SamplingOptions(temperature=0.0, max_new_tokens=most)
    shown, _ = talk(session, "ab", sampling)
    assert shown.rstrip("\ufffd") == shown == SAID.encode()[:most].decode(errors="ignore").rstrip("\ufffd")
    session.undo()
    assert talk(session, "ab", sampling)[0] == shown
    session.save(tmp_path / "talk.safetensors")
    other, engine_after = talker.session([])
    other.load(tmp_path / "talk.safetensors")
    assert other.messages == session.messages
    assert list(engine_after.tokens) == list(engine.tokens)
    engine.answer_ids = []
    ends = [talk(one, "b", SamplingOptions(temperature=0.0))[1] for one in (session, other)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].usage.reused_tokens == ends[1].usage.reused_tokens
    assert list(engine_after.tokens) == list(engine.tokens)
    assert said_in(talker, session._chat.timeline.tokens) == shown
