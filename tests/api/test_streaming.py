"""`stream`: deltas that join to the whole, what they hold by `output_kind`, and streams for `async for`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from hybrid_jax import RequestOutputKind, SamplingParams
from tests.api.fake_engine import GREEDY, SCRIPT, texts

PARAMS = {"max_tokens": 12, "n": 2, "logprobs": 1}


def test_cumulative_deltas_hold_everything_so_far(llm):
    news = list(llm.stream("ab", SamplingParams(**PARAMS)))
    whole = list(llm.stream("ab", SamplingParams(**PARAMS, output_kind="cumulative")))
    assert len(news) == len(whole) > 2
    for index in range(2):
        text, tokens = "", ()
        pairs = [(a, b) for a, b in zip(news, whole, strict=True) if a.index == index]
        for new, all_of_it in pairs:
            text, tokens = text + new.text, tokens + new.token_ids
            assert (all_of_it.text, all_of_it.token_ids) == (text, tokens)
            assert len(all_of_it.logprobs) == len(tokens)


def test_final_only_yields_each_completion_once(llm):
    [expected] = llm.generate("ab", SamplingParams(**PARAMS))
    kind = RequestOutputKind.FINAL_ONLY
    deltas = list(llm.stream("ab", SamplingParams(**PARAMS, output_kind=kind)))
    assert [delta.index for delta in deltas] == [0, 1]
    assert [delta.text for delta in deltas] == [output.text for output in expected.outputs]
    assert (
        all(delta.finished() for delta in deltas) and deltas[-1].output.outputs == expected.outputs
    )


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="output_kind must be one of delta, .*, got 'news'"):
        SamplingParams(output_kind="news")


def test_streams_for_async_for_run_side_by_side(llm):
    async def collect(prompt):
        return [delta.text async for delta in llm.astream(prompt, SamplingParams(max_tokens=30))]

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        texts = await asyncio.gather(collect("ab"), collect("cd"), collect("abc"))
        other.cancel()
        return texts, ticks

    texts, ticks = asyncio.run(main())
    want = llm.generate(["ab", "cd", "abc"], SamplingParams(max_tokens=30))
    assert ["".join(parts) for parts in texts] == [output.outputs[0].text for output in want]
    assert ticks > 3


def test_leaving_an_async_stream_ends_its_request(llm):
    async def main():
        async with contextlib.aclosing(llm.astream("ab", SamplingParams(max_tokens=90))) as deltas:
            async for _ in deltas:
                break
        llm.stats()  # comes after what was left is ended
        assert not llm._engine.has_work

    asyncio.run(main())
    assert llm.generate("ab", SamplingParams(max_tokens=3))[0].finished


def test_a_cancelled_task_ends_its_request(llm):
    llm._engine.pause = 0.01

    async def main():
        started = asyncio.Event()

        async def forever():
            async for _ in llm.astream("ab", SamplingParams(max_tokens=150)):
                started.set()

        task = asyncio.create_task(forever())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    llm.stats()
    assert len(llm._engine.aborted) == 1
    assert llm.generate("ab", SamplingParams(max_tokens=3))[0].finished


def test_a_mistake_is_raised_where_the_stream_is_read(llm):
    async def main():
        async for _ in llm.astream("", SamplingParams(max_tokens=3)):
            pass

    with pytest.raises(ValueError, match="prompt 0: is empty"):
        asyncio.run(main())


def test_a_failure_of_the_engine_is_raised_where_the_stream_is_awaited(llm, monkeypatch):
    step, turns = llm._engine.step, itertools.count(1)

    def breaks():
        return step() if next(turns) < 3 else 1 / 0

    monkeypatch.setattr(llm._engine, "step", breaks)

    async def main():
        async for _ in llm.astream("ab", SamplingParams(max_tokens=30)):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_deltas_join_to_what_generate_returns(make_llm, monkeypatch):
    llm = make_llm(steps_per_dispatch=3)
    monkeypatch.setattr(type(llm._engine), "script", "né 你好 🙂 stop".encode())
    params = SamplingParams(max_tokens=30, stop="stop", logprobs=1)
    [expected] = llm.generate("ab", params)
    deltas = list(llm.stream("ab", params))
    assert len(deltas) > 3
    assert "".join(d.text for d in deltas) == expected.outputs[0].text == "né 你好 🙂 "
    assert sum((d.token_ids for d in deltas), ()) == expected.outputs[0].token_ids
    assert sum((d.logprobs for d in deltas), ()) == expected.outputs[0].logprobs
    assert all("\ufffd" not in d.text for d in deltas)
    assert [d.finished() for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].output.outputs == expected.outputs


def test_several_prompts_stream_together(llm):
    params = SamplingParams(max_tokens=20, n=2)
    found = {}
    for delta in llm.stream(["a", "b"], params):
        key = delta.prompt_index, delta.index
        found[key] = found.get(key, "") + delta.text
    assert found == {(p, i): (SCRIPT * 2)[4 * i :][:20] for p in range(2) for i in range(2)}


def test_closing_a_stream_ends_its_request(llm):
    llm._engine.pause = 0.01
    deltas = llm.stream("ab", SamplingParams(max_tokens=100))
    next(deltas)
    assert llm._engine.has_work
    deltas.close()
    llm.stats()  # comes after what was left is ended
    assert not llm._engine.has_work and len(llm._engine.aborted) == 1
    llm._engine.pause = 0
    assert texts(llm.generate("ab", GREEDY)) == [SCRIPT[:12]]


def test_generate_inside_a_stream_loop(llm):
    streamed = ""
    for delta in llm.stream("ab", SamplingParams(max_tokens=40)):
        streamed += delta.text
        assert texts(llm.generate("cd", GREEDY)) == [SCRIPT[:12]]
    assert streamed == SCRIPT[:40]


def test_a_stream_checks_its_prompt_before_the_first_step(llm):
    with pytest.raises(ValueError, match="prompt 0: is empty"):
        llm.stream("")
