"""One runtime for several threads and for an event loop: fair, one answer at a time, cancelled at any moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.chat import make_chat_model

import edgekv
from edgekv import sharing
from edgekv.model.converted import ConvertedModel
from edgekv.sharing import TurnEvents, Turns


def ask(number: int) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": f"Question number {number}"}]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    """A tiny model with a template and scales; greedy by default, so answers are repeatable."""
    return make_chat_model(Path(__file__).parents[1] / "data" / "llama-fp16", tmp_path_factory.mktemp("chat"))


@pytest.fixture
def runtime(chat_model: ConvertedModel) -> Iterator[edgekv.Runtime]:
    """It, loaded."""
    with edgekv.load(chat_model.folder, memory="4GiB", context=256, threads=1) as loaded:
        yield loaded


@pytest.fixture
def alone(runtime: edgekv.Runtime) -> list[str]:
    """The answers to ask(0) .. ask(7), each on an empty cache."""
    answers = []
    for number in range(8):
        runtime.chat_state.reset()
        answers.append(runtime.chat(ask(number), max_new_tokens=20).text)
    runtime.chat_state.reset()
    return answers


class TestTurns:
    """The line."""

    def test_first_come_first_served(self) -> None:
        """Eight threads get their turns in the order in which they asked."""
        turns, order = Turns(), []
        first = turns.take()

        def work(number: int) -> None:
            with turns.take():
                order.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for count, thread in enumerate(threads, 2):
            thread.start()
            while len(turns._line) < count:
                time.sleep(0.001)
        first.release()
        first.release()  # twice is fine
        for thread in threads:
            thread.join(10)
        assert order == list(range(8))

    def test_someone_who_leaves_the_line_holds_nobody_up(self) -> None:
        """A turn that is given up before it began is skipped."""
        turns = Turns()
        first, begun = turns.take(), threading.Event()

        def work() -> None:
            with turns.take():
                begun.set()

        thread = threading.Thread(target=work)
        thread.start()
        first.release()
        assert begun.wait(10)
        thread.join(10)
        turns.take().release()

    def test_a_stream_keeps_its_turn_while_it_runs(self) -> None:
        """Somebody else who asks it for an event, or closes it, meanwhile gets Python's error and frees nothing."""
        turns = Turns()

        def events() -> Iterator[Any]:
            for meddle in (stream.__next__, stream.close, lambda: stream.throw(RuntimeError())):
                with pytest.raises(ValueError, match="already executing"):
                    meddle()
            assert len(turns._line) == 1
            yield None

        stream = TurnEvents(events(), turns.take())
        assert list(stream) == [None]
        assert not turns._line


class TestThreads:
    """Runtime under several threads."""

    def test_every_thread_gets_its_own_answer(self, runtime: edgekv.Runtime, alone: list[str]) -> None:
        """Eight at once, each right, none mixed."""
        answers: dict[int, str] = {}

        def work(number: int) -> None:
            answers[number] = runtime.chat(ask(number), max_new_tokens=20).text

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [answers[number] for number in range(8)] == alone

    def test_a_stream_keeps_its_turn_until_it_ends(self, runtime: edgekv.Runtime, alone: list[str]) -> None:
        """Another thread waits for a stream that is read slowly, and goes on when it is dropped."""
        stream = runtime.stream(ask(0), max_new_tokens=20)
        next(stream)
        other: list[str] = []
        thread = threading.Thread(target=lambda: other.append(runtime.chat(ask(1), max_new_tokens=20).text))
        thread.start()
        assert sum(isinstance(next(stream), edgekv.TextDelta) for _ in range(5)) == 5
        assert not other
        del stream
        thread.join(60)
        assert other == [alone[1]]

    def test_a_thread_that_waits_for_itself_is_told(
        self, runtime: edgekv.Runtime, alone: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread of a pool starts a second answer while it holds its own unfinished one: an error, not a wait without
        end. The first answer goes on, and whoever waits behind it has a turn."""
        monkeypatch.setattr(sharing, "OWN_WAIT_S", 0.05)
        texts: list[str] = []

        def work() -> None:
            stream = runtime.stream(ask(0), max_new_tokens=20)
            first = next(stream)
            with pytest.raises(edgekv.InvalidOption, match="begun itself"):
                runtime.chat(ask(1), max_new_tokens=20)
            with pytest.raises(edgekv.InvalidOption, match="begun itself"):
                runtime.session().reset()
            events = [event for event in (first, *stream) if isinstance(event, edgekv.TextDelta)]
            texts.append("".join(event.text for event in events))
            texts.append(runtime.chat(ask(1), max_new_tokens=20).text)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert texts == alone[:2]

    def test_a_pool_that_shares_an_answer_waits_for_it(
        self, runtime: edgekv.Runtime, alone: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread begins an answer that another reads, slowly, and asks for the next one meanwhile: it waits."""
        monkeypatch.setattr(sharing, "OWN_WAIT_S", 0.02)
        texts: list[str] = []
        streams: list[Any] = []
        reading = threading.Event()

        def begin() -> None:
            streams.append(runtime.stream(ask(0), max_new_tokens=20))
            reading.wait(60)
            texts.append(runtime.chat(ask(1), max_new_tokens=20).text)

        thread = threading.Thread(target=begin)
        thread.start()
        while not streams:
            time.sleep(0.001)
        next(streams[0])
        reading.set()
        time.sleep(0.2)
        assert thread.is_alive()
        list(streams.pop())
        thread.join(60)
        assert texts == [alone[1]]

    def test_an_answer_in_another_threads_hands_is_waited_for(
        self, runtime: edgekv.Runtime, alone: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread that loaded the model begins it and asks for the next one: the reader has it whole first."""
        monkeypatch.setattr(sharing, "OWN_WAIT_S", 0.02)
        stream = runtime.stream(ask(0), max_new_tokens=20)
        reading, read_there = threading.Event(), []

        def read() -> None:
            for event in stream:
                read_there.append(event.text if isinstance(event, edgekv.TextDelta) else "")
                reading.set()
                time.sleep(0.02)

        thread = threading.Thread(target=read)
        thread.start()
        reading.wait(60)
        assert runtime.chat(ask(1), max_new_tokens=20).text == alone[1]
        assert "".join(read_there) == alone[0]
        thread.join(60)

    def test_an_answer_whose_other_reader_is_gone_ends(self, runtime: edgekv.Runtime, alone: list[str]) -> None:
        """Nobody would ever end it but the thread that begins the next one."""
        stream = runtime.stream(ask(0), max_new_tokens=20)
        thread = threading.Thread(target=next, args=(stream,))
        thread.start()
        thread.join(60)
        assert runtime.precheck(ask(1)).fits
        assert runtime.chat(ask(1), max_new_tokens=20).text == alone[1]
        assert list(stream) == []

    def test_a_refusal_gives_the_turn_back(self, runtime: edgekv.Runtime) -> None:
        """The next one does not wait for a prompt that was refused."""
        with pytest.raises(edgekv.ContextOverflow):
            runtime.chat([{"role": "user", "content": "word " * 400}])
        with pytest.raises(RuntimeError, match="enough"):
            runtime.chat(ask(0), on_event=fail)
        thread = threading.Thread(target=lambda: runtime.chat(ask(1), max_new_tokens=2))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def test_whoever_keeps_a_consumers_error_does_not_keep_the_turn(self, runtime: edgekv.Runtime) -> None:
        """A traceback holds everything that was going on, the stream too."""
        kept: list[BaseException] = []

        def work() -> None:
            try:
                runtime.chat(ask(0), on_event=fail)
            except RuntimeError as error:
                kept.append(error)

        for target in (work, lambda: runtime.chat(ask(1), max_new_tokens=2)):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        assert kept

    def test_a_precheck_waits_for_others_though_an_own_stream_has_ended(self, runtime: edgekv.Runtime) -> None:
        """A stream that was read to its end may still be at hand; by now another thread changes the cache."""
        ended = runtime.stream(ask(0), max_new_tokens=2)
        list(ended)
        order, begun = [], threading.Event()

        def other() -> None:
            with runtime.chat_state.exclusive():
                begun.set()
                time.sleep(0.3)
                order.append("other")

        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        runtime.precheck(ask(1))
        order.append("precheck")
        thread.join()
        assert order == ["other", "precheck"]

    def test_progress_is_called_back(self, runtime: edgekv.Runtime) -> None:
        """`on_event` sees what a stream would have given."""
        seen: list[object] = []
        reply = runtime.chat(ask(0), max_new_tokens=5, on_event=seen.append)
        assert seen[-1] is reply
        assert "".join(event.text for event in seen if isinstance(event, edgekv.TextDelta)) == reply.text


def fail(event: object) -> None:
    """A consumer with a bug."""
    raise RuntimeError("enough")


class TestAsync:
    """AsyncRuntime."""

    def run(self, chat_model: ConvertedModel, scenario, **options) -> None:
        """Run a scenario with a fresh AsyncRuntime in a fresh loop."""

        async def main() -> None:
            runtime = edgekv.load(chat_model.folder, memory="4GiB", context=256, threads=1)
            async with edgekv.AsyncRuntime(runtime, **options) as shared:
                await scenario(shared)

        asyncio.run(main())

    def test_answers_are_right_under_cancellation(self, chat_model: ConvertedModel, alone: list[str]) -> None:
        """Twenty-four tasks, every third cancelled at some moment: the others' answers are those of a quiet runtime."""

        async def one(shared: edgekv.AsyncRuntime, number: int) -> str:
            return (await shared.chat(ask(number % 8), max_new_tokens=20)).text

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            tasks = [asyncio.create_task(one(shared, number)) for number in range(24)]
            await asyncio.sleep(0)
            assert shared.waiting + shared.running == 24
            for number in range(0, 24, 3):
                await asyncio.sleep(0.004)
                tasks[number].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for number, answer in enumerate(answers):
                assert answer == alone[number % 8] or (number % 3 == 0 and isinstance(answer, asyncio.CancelledError))
            assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)
            assert shared.waiting + shared.running == 0

        self.run(chat_model, scenario)

    def test_a_stream_ends_when_it_is_closed(self, chat_model: ConvertedModel) -> None:
        """What was read is a beginning of the answer, and the cache holds the prompt and a beginning of the answer."""

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            whole = (await shared.chat(ask(0), max_new_tokens=150)).text
            shown = ""
            async with shared.stream(ask(0), max_new_tokens=150) as events:
                async for event in events:
                    shown += event.text if isinstance(event, edgekv.TextDelta) else ""
                    if len(shown) > 4:
                        break
            assert [event async for event in events] == []
            chat = shared.runtime.chat_state
            prompt = shared.runtime.precheck(ask(0)).input_tokens
            said = chat.tokenizer.decode(chat.timeline.tokens[prompt:])
            assert whole.startswith(said)
            assert said.startswith(shown)
            assert (await shared.chat(ask(0), max_new_tokens=150)).text == whole

        self.run(chat_model, scenario)

    def test_a_full_line_and_a_long_wait_are_refused(self, chat_model: ConvertedModel) -> None:
        """`Busy` says which; whoever gives up leaves the line at once."""

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            first = shared.stream(ask(0), max_new_tokens=150)
            await first.begin()
            second = shared.stream(ask(1), wait_s=0.001)
            with pytest.raises(edgekv.Busy, match="most") as full:
                shared.stream(ask(2))
            assert full.value.full
            with pytest.raises(edgekv.Busy, match=r"0\.001 s") as slow:
                await second.begin()
            assert not slow.value.full
            assert shared.waiting == 0
            await first.aclose()
            assert (await shared.generate("Once", max_new_tokens=2)).usage.output_tokens == 2
            assert (await shared.precheck(ask(3))).fits

        self.run(chat_model, scenario, max_waiting=1)

    def test_refusals_come_out_where_they_are_awaited(self, chat_model: ConvertedModel) -> None:
        """The prompt's, the options', and those of a closed runtime."""

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            with pytest.raises(edgekv.ContextOverflow):
                await shared.chat([{"role": "user", "content": "word " * 400}])
            with pytest.raises(edgekv.InvalidOption, match="temprature"):
                await shared.chat(ask(0), temprature=1)
            await shared.close()
            with pytest.raises(edgekv.InvalidOption, match="closed"):
                shared.stream(ask(0))
            with pytest.raises(edgekv.InvalidOption, match="closed"):
                await shared.precheck(ask(0))

        self.run(chat_model, scenario)

    def test_each_dialogue_keeps_its_cache(self, chat_model: ConvertedModel) -> None:
        """Two users in turn: what a prompt shares with the user's own last one is not read again."""

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            users = [(edgekv.Dialogue(), ask(number)) for number in range(2)]
            first = [await shared.chat(talk, dialogue=user, max_new_tokens=4) for user, talk in users]
            for (user, talk), before in zip(users, first, strict=True):
                longer = [*talk, {"role": "assistant", "content": before.text}, *ask(2)]
                again = await shared.chat(longer, dialogue=user, max_new_tokens=4)
                assert again.usage.reused_tokens >= before.usage.input_tokens

        self.run(chat_model, scenario)

    def test_closing_ends_what_is_waiting(self, chat_model: ConvertedModel) -> None:
        """No task hangs."""

        async def scenario(shared: edgekv.AsyncRuntime) -> None:
            streams = [shared.stream(ask(number), max_new_tokens=150) for number in range(4)]
            await streams[0].begin()
            await shared.close()
            for stream in streams[1:]:
                assert [event async for event in stream] == []

        self.run(chat_model, scenario)
