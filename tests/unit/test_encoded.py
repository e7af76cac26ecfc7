"""What a conversation without end keeps: few bytes a token, and nothing shows that the rest has been forgotten."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from array import array
from pathlib import Path
from random import Random

import pytest
import tokenizers
from helpers.fake_engine import FakeEngine, fake_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.chat import Chat
from edgekv.encoded import Departed, EncodedText
from edgekv.generate import Finished, Usage
from edgekv.kv.spec import KVSpec
from edgekv.sampling import SamplingOptions
from edgekv.session import Session
from edgekv.text.prompt import ChatFormat
from edgekv.text.template import ChatTemplate
from edgekv.text.tokenizer import Tokenizer

FILE = Path(__file__).parents[1] / "data" / "llama-fp16" / "tokenizer.json"
CHATML = """
{%- for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif -%}"""
THINKING = """
{%- for m in messages %}
    {%- set thought = 'hm ' if m['role'] == 'assistant' and not loop.last else '' %}
    {{- '<s>' + m['role'] + '\n' + thought + m['content'] + '</s>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<s>assistant\n' }}{%- endif %}"""
BARE = """
{%- for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif -%}"""


def new_session(source: str = CHATML, capacity: int = 256, answer: int = 24) -> Session:
    """A session over an engine without a model; its answers are random tokens, control tokens among them."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(FILE)))
    spec = fake_spec(tokenizer.vocab_size, eos_ids=(2,))
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    chat = Chat(
        FakeEngine(KVSpec(capacity, sinks=4, stride=capacity // 8), spec), tokenizer, ChatFormat(tokenizer, template)
    )
    return Session(chat, sampling=SamplingOptions(temperature=0.0, max_new_tokens=answer), overflow="window")


def say(session: Session, text: str) -> tuple[str, Usage]:
    """One turn: the answer and what it took, less the times."""
    *_, last = session.send(text)
    assert isinstance(last, Finished)
    usage = last.usage
    return last.text, Usage(
        usage.input_tokens, usage.reused_tokens, usage.output_tokens, usage.evicted_tokens, usage.evicted_turns
    )


GROWING = st.lists(st.sampled_from(["say", "say", "say", "system", "other"]), min_size=4, max_size=40)
CHANGING = st.lists(st.sampled_from(["say", "say", "say", "undo", "edit", "other"]), min_size=4, max_size=40)
PLANS = GROWING.map(lambda steps: (steps, False)) | CHANGING.map(lambda steps: (steps, True))


@pytest.mark.parametrize("source", [CHATML, THINKING, BARE])
@given(
    GROWING.map(lambda steps: (steps, False)) | CHANGING.map(lambda steps: (steps, True)),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=25)
def test_forgetting_changes_nothing(source: str, plan: tuple[list[str], bool], random: Random) -> None:
    """Answers, lengths, what is reused and what leaves are those of a chat that keeps the words and ids of everything,
    also as turns are taken back, the system prompt changes, old messages are edited and other things are read.

    (Where a change reaches into what has left, all is read again, and answers are tokenised again, too: so they are
    then ones that give the same tokens.)"""
    steps, tokenised_again = plan
    one, other = new_session(source), new_session(source)
    other._chat._staying = lambda prompt, state: prompt.encoded  # type: ignore[method-assign]
    for number, step in enumerate(steps):
        at = random.randrange(1 + len(one.messages))
        for session in (one, other):
            if step == "undo":
                session.undo()
            elif step == "system":
                session.set_system(f"Be brief {number % 2}.")
            elif step == "edit" and at < len(session.messages):
                session.messages[at] = session.messages[at] | {"content": f"edited {number}"}  # type: ignore[typeddict-item]
            elif step == "other":
                list(
                    session._chat.stream_text(
                        "Something else", SamplingOptions(temperature=0.0, max_new_tokens=2), "window"
                    )
                )
        text = f"Question {number}. " * (1 + number % 3)
        report = one.precheck(text)
        assert report == other.precheck(text)
        for session in (one, other):
            engine, answer = session._chat.timeline.engine, f"It is {number} and more."
            engine.answer_ids = session._chat.tokenizer.encode(answer) if tokenised_again else None  # type: ignore[attr-defined]
        if report.fits:
            assert say(one, text) == say(other, text)
        assert one._chat.timeline.tokens == other._chat.timeline.tokens
    assert other._chat._known.departed.tokens == 0


def test_what_has_left_is_forgotten() -> None:
    """Words and ids are kept of little more than the cache holds; where turns began is kept of all of them."""
    session = new_session()
    for number in range(40):
        say(session, f"This is question {number}")
        known = session._chat._known
        assert known.tokens == len(session._chat.timeline.tokens)
        window = session._chat.timeline.window
        if number > 20:
            assert len(known.ids) < window.length + 150
            assert known.departed.tokens <= window.pinned + window.evicted
    assert len(known.departed.turn_chars) > 60
    report = session.precheck("?")
    assert report.turns_gone == tuple(range(len(report.turns_gone)))
    assert len(report.turns_gone) > 60


def test_text_is_known_again_by_its_words_and_ids() -> None:
    """Another word in the departed part, another id, or less of either, and it is not the same text."""
    text, ids = "<s>one</s><s>two</s>", array("i", [1, 5, 2, 1, 6, 2])
    known = EncodedText(text, ids, array("q", [0, 3, 6, 10, 13, 16]))
    left = known.without(4, text, ids, ((0, 0), (10, 3)), frozenset({1}))
    assert (left.text, left.ids.tolist(), left.departed.chars, left.departed.tokens) == ("<s>two</s>", [1, 6, 2], 10, 3)
    assert (left.chars, left.tokens) == (known.chars, known.tokens)
    assert [left.token_at(offset) for offset in (0, 10, 13, 14, 99)] == [0, 3, 4, 5, 6]
    assert left.shared_with(text + "?", ids, frozenset({1})) is left
    for other, passed in (("<s>One" + text[6:], ids), (text, array("i", [1, 4])), (text[:9], ids), (text, ids[:2])):
        assert left.shared_with(other, passed, frozenset({1})) == EncodedText()
    edited = left.shared_with(text[:13] + "six", ids, frozenset({1}))
    assert (edited.text, edited.departed) == ("", left.departed)
    assert Departed.from_json(left.departed.to_json()) == left.departed
    assert Departed.from_json(None) == Departed()
    with pytest.raises(ValueError, match="cannot be"):
        Departed.from_json(left.departed.to_json() | {"tokens": -1})


@pytest.mark.parametrize(("answer", "limit"), [(200, 16), (30, 24)])
def test_bytes_a_token(answer: int, limit: int) -> None:
    """A token of a conversation takes its text, 4 bytes of id and a share of what is kept of its turn: about 700 bytes.

    Measured between two lengths, so that what is the same at both (caches, buffers) does not count."""
    session = new_session(capacity=64, answer=answer)
    sizes, texts, lengths = [], [], []
    tracemalloc.start()
    try:
        for until in (1_000, 4_000):
            while session._chat.timeline.window.evicted < until:
                session._chat.timeline.engine.log.clear()  # type: ignore[attr-defined]
                say(session, f"Question {len(session.messages)}")
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            texts.append(sum(sys.getsizeof(message["content"]) for message in session.messages))
            lengths.append(len(session._chat.timeline.tokens))
    finally:
        tracemalloc.stop()
    text, size = ((values[1] - values[0]) / (lengths[1] - lengths[0]) for values in (texts, sizes))
    print(f"answers of {answer} tokens: {text:.1f} bytes a token of text and {size - text:.1f} beside")
    assert size - text < limit
