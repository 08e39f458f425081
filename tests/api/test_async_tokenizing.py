"""`async for` while texts are tokenized: the event loop goes on, requests keep their order, and only so many wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api.threads import calls, front
from tests.api.fake_engine import GREEDY, SCRIPT

SAMPLED = SamplingParams(temperature=1.0, max_tokens=5)
SLOW = "slow"  # a text that ends so is not tokenized before its event is set


class SlowTokenizer:
    """The tokenizer of an LLM, held up at some texts."""

    def __init__(self, llm, monkeypatch):
        self.tokenizer = llm.get_tokenizer()
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.threads = set()
        encode = self.tokenizer.encode

        def slow(text, **options):
            self.threads.add(threading.current_thread())
            if text.endswith(SLOW):
                self.began.set()
                assert self.goes_on.wait(20), "whoever waits for the text keeps the event loop"
            return encode(text, **options)

        monkeypatch.setattr(self.tokenizer, "encode", slow)


@pytest.fixture
def slow(llm, monkeypatch):
    return SlowTokenizer(llm, monkeypatch)


async def read(deltas):
    return [delta async for delta in deltas][-1].output


async def until(condition):
    """Lets other tasks go on until something holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def ways(llm):
    chat = [{"role": "user", "content": SLOW}]
    return {"astream": llm.astream(SLOW, GREEDY), "astream_chat": llm.astream_chat(chat, GREEDY)}


@pytest.mark.parametrize("way", ["astream", "astream_chat"])
def test_the_event_loop_goes_on_while_a_text_is_tokenized(llm, slow, way):
    async def main():
        task = asyncio.create_task(read(ways(llm)[way]))
        await until(slow.began.is_set)
        assert not task.done()
        slow.goes_on.set()
        return await task

    assert asyncio.run(main()).outputs[0].text == SCRIPT[:12]
    assert threading.main_thread() not in slow.threads


def test_requests_keep_their_order_and_their_seeds(make_llm, slow, llm):
    prompts = ["a" + SLOW, "b", "c", [100, 101]]

    async def main():
        tasks = [asyncio.create_task(read(llm.astream(prompt, SAMPLED))) for prompt in prompts]
        await until(slow.began.is_set)
        assert not llm._engine.added  # a short text does not overtake a long one
        slow.goes_on.set()
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(main())
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    other = make_llm()
    for prompt in prompts:
        other.generate([prompt], SAMPLED)
    order = lambda llm: [(r.request_id, r.seed, r.prompt) for r in llm._engine.added]  # noqa: E731
    assert order(llm) == order(other)


def test_a_refused_text_takes_no_number_from_the_next(llm):
    async def main():
        with pytest.raises(ValueError, match="prompt 0: is empty"):
            await read(llm.astream("", SAMPLED))
        first = llm.astream("ab", SAMPLED)
        later = await read(llm.astream("cd", SAMPLED))
        return (await read(first)).request_id, later.request_id

    assert asyncio.run(main()) == ("0", "1")  # as the calls came, not as they were read
    assert llm.stats()["requests"] == 2


def test_mistakes_that_no_tokenizer_finds_are_raised_at_the_call(llm):
    for prompts, params, message in (
        (5, None, "prompts must be text, token ids, or a list of prompts, got 5"),
        (
            ["a", "b"],
            [GREEDY],
            "sampling_params: 2 prompts and 1 SamplingParams; give one, or one for each prompt",
        ),
        (["a", [999]], None, "prompt 1: token ids must lie between 0 and 255, got 999"),
        ([{"prompt_token_ids": []}], None, "prompt 0: is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.astream(prompts, params)
    assert llm.stats()["requests"] == 0


def test_prompts_are_those_of_the_call_whatever_becomes_of_them(llm):
    ids, text, messages = [97, 98], {"prompt": "ab"}, [{"role": "user", "content": "hi"}]
    deltas = [llm.astream([ids, text], GREEDY), llm.astream_chat(messages, GREEDY)]
    ids.append(99)
    text["prompt"] = "abc"
    messages[0]["content"] = "ho"

    async def main():
        for stream in deltas:
            await read(stream)

    asyncio.run(main())
    prompts = [bytes(request.prompt).decode() for request in llm._engine.added]
    assert prompts == ["ab", "ab", "<user>hi"]


@pytest.mark.parametrize("begun", [True, False])
def test_a_task_that_is_cancelled_before_its_text_is_tokenized_leaves_nothing(llm, slow, begun):
    async def main():
        tasks = [asyncio.create_task(read(llm.astream(text, GREEDY))) for text in (SLOW, "later")]
        await until(slow.began.is_set)
        gone, stays = tasks if begun else reversed(tasks)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        slow.goes_on.set()
        return await stays

    output = asyncio.run(main())
    assert output.outputs[0].text == SCRIPT[:12]
    assert llm.stats() and len(llm._engine.added) == 1
    assert not llm._engine.has_work and not llm._thread._waiting
    assert llm.generate("ab", GREEDY)[0].finished


def test_an_error_of_one_text_is_that_of_its_call(llm, slow):
    async def main():
        calls = [llm.astream(text, GREEDY) for text in (SLOW, "x" * 300, "ab")]
        tasks = [asyncio.create_task(read(deltas)) for deltas in calls]
        await until(slow.began.is_set)
        slow.goes_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, refused, last = asyncio.run(main())
    assert "prompt 0: has 300 tokens and needs room for one more" in str(refused)
    assert first.outputs[0].text == last.outputs[0].text == SCRIPT[:12]


def test_only_so_many_streams_may_wait_for_their_first_token(llm, slow, monkeypatch):
    monkeypatch.setattr(front, "MAX_WAITING", 3)
    message = "LLM: 3 streams wait for their first token, the most that may; begin more once some of them have one"

    async def main():
        waiting = [asyncio.create_task(read(llm.astream(SLOW, GREEDY))) for _ in range(3)]
        await until(slow.began.is_set)
        with pytest.raises(RuntimeError, match=message):
            await read(llm.astream("ab", GREEDY))
        assert len(llm.generate(["ab"] * 9, GREEDY)) == 9  # whose caller waits too
        slow.goes_on.set()
        await asyncio.gather(*waiting)
        return await read(llm.astream(["ab"] * 9, GREEDY))

    assert asyncio.run(main()).finished
    assert not llm._thread._waiting


def test_a_stream_that_has_a_token_waits_no_longer(llm, monkeypatch):
    monkeypatch.setattr(front, "MAX_WAITING", 1)

    async def main():
        async with contextlib.aclosing(llm.astream("ab", SamplingParams(max_tokens=90))) as deltas:
            await anext(deltas)
            return await read(llm.astream("cd", GREEDY))

    assert asyncio.run(main()).finished


def test_texts_that_wait_when_the_llm_is_closed_say_so(llm, slow):
    async def main():
        tasks = [asyncio.create_task(read(llm.astream(SLOW, GREEDY))) for _ in range(2)]
        unread = llm.astream("ab", GREEDY)
        await until(slow.began.is_set)
        llm.close()
        slow.goes_on.set()
        return await asyncio.gather(*tasks, read(unread), return_exceptions=True)

    assert {str(error) for error in asyncio.run(main())} == {calls.CLOSED}
