"""Calls that mypy must report, and calls beside them that it must not; nothing here is ever run.

A wrong line is marked `# type: ignore[code]`. With `warn_unused_ignores` mypy is content with this file only if
exactly these lines have errors, with exactly these codes: `make lint` and tests/typing/test_editors.py run it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import pydantic

import hybrid_jax
from hybrid_jax import (
    LLM,
    BatchSummary,
    CacheConfig,
    CompletionOutput,
    Delta,
    EngineConfig,
    Logprob,
    ModelConfig,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SpeculationConfig,
    StructuredOutputsParams,
    load_model,
    run_batch,
)


class Person(pydantic.BaseModel):
    name: str


def names() -> None:
    from hybrid_jax import NoSuchName  # type: ignore[attr-defined] # noqa: F401

    hybrid_jax.NoSuchThing  # type: ignore[attr-defined] # noqa: B018
    hybrid_jax.LLm()  # type: ignore[attr-defined]
    assert_type(hybrid_jax.__version__, str)


def making(config: ModelConfig, params: Any) -> None:
    LLM(modle="x")  # type: ignore[call-arg]
    LLM(cahe="off")  # type: ignore[call-arg]
    LLM(max_num_seqs=8)  # type: ignore[call-arg]
    LLM("model", 8)  # type: ignore[call-arg, arg-type]
    LLM(max_rows="8")  # type: ignore[arg-type]
    LLM(cache=0.5)  # type: ignore[arg-type]
    LLM(grain="32")  # type: ignore[arg-type]
    LLM(kernels="triton")  # type: ignore[arg-type]
    LLM(quantize="int3")  # type: ignore[arg-type]
    LLM.from_params(config)  # type: ignore[call-arg]
    LLM.from_params(config, params, progress=True)  # type: ignore[call-arg]
    LLM.from_params(config, params, memory=0.5)  # type: ignore[arg-type]
    assert_type(LLM(), LLM)
    LLM(Path("model"), dtype="bfloat16", memory="8GiB", max_rows=4, cache=CacheConfig(), exact=True)
    LLM(grain=32, page_tokens=None, prefill_tokens=64, steps_per_dispatch=4, kernels="xla")
    LLM(
        speculation=SpeculationConfig(num_tokens=3),
        quantize="int8",
        mesh=None,
        cache_dir="cache",
        disk_memory="20GiB",
    )
    LLM(progress=lambda done, total: print(done / total))
    LLM.from_params(config, params, quiet=True, memory="1GiB", cache="lru", grain=16, seed=3)
    LLM.from_params(*load_model("model", dtype="float32"))


def settings() -> None:
    EngineConfig(max_row=4)  # type: ignore[call-arg]
    EngineConfig(8)  # type: ignore[call-arg]
    CacheConfig(polcy="lru")  # type: ignore[call-arg]
    CacheConfig(history_tokens="many")  # type: ignore[arg-type]
    EngineConfig().max_rows = 3  # type: ignore[misc]
    EngineConfig(memory=2**30, cache=CacheConfig(policy="lru", history_tokens=0))


def sampling(schema: Mapping[str, Any], person: Person) -> None:
    SamplingParams(max_token=3)  # type: ignore[call-arg]
    SamplingParams(best_of=3)  # type: ignore[call-arg]
    SamplingParams(3)  # type: ignore[call-arg]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    SamplingParams(max_tokens=1.5)  # type: ignore[arg-type]
    SamplingParams(stop=3)  # type: ignore[arg-type]
    SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]
    SamplingParams().temperature = 0.5  # type: ignore[misc]
    SamplingParams().max_token  # type: ignore[attr-defined] # noqa: B018
    StructuredOutputsParams(schema=schema)  # type: ignore[call-arg]
    StructuredOutputsParams(choice="yes")  # type: ignore[arg-type]
    StructuredOutputsParams(json=person)  # type: ignore[arg-type]
    StructuredOutputsParams(json=Path)  # type: ignore[arg-type]
    form = StructuredOutputsParams(json=Person)
    SamplingParams(temperature=0, stop="x", stop_token_ids=[1], structured_outputs=form)
    SamplingParams(logit_bias={3: -1}, output_kind="final_only", bad_words=["x"], seed=1)
    SamplingParams(output_kind=RequestOutputKind.DELTA)
    StructuredOutputsParams(json=schema)
    StructuredOutputsParams(json='{"type": "object"}')
    assert_type(SamplingParams().greedy, bool)


def generating(llm: LLM) -> None:
    llm.genrate("x")  # type: ignore[attr-defined]
    llm.generate()  # type: ignore[call-arg]
    llm.generate("x", SamplingParams(), max_tokens=3)  # type: ignore[call-arg]
    llm.generate("x", {"max_tokens": 3})  # type: ignore[arg-type]
    llm.generate(3)  # type: ignore[arg-type]
    llm.chat("hello")  # type: ignore[arg-type]
    [output] = llm.generate("x", SamplingParams(max_tokens=3))
    output.text  # type: ignore[attr-defined] # noqa: B018
    output.outputs[0].tokens  # type: ignore[attr-defined] # noqa: B018
    output.outputs[0].text + 1  # type: ignore[operator]
    assert_type(output, RequestOutput)
    assert_type(output.outputs[0], CompletionOutput)
    assert_type(output.outputs[0].text, str)
    assert_type(output.metrics.ttft_s, float | None)
    if positions := output.outputs[0].logprobs:
        assert_type(positions[0][3], Logprob)
    llm.generate(["x", [1, 2], {"prompt": "x"}], [SamplingParams()] * 3, progress=True)
    llm.chat([{"role": "user", "content": "x"}], SamplingParams())
    llm.generate(llm.render_chat([{"role": "user", "content": "x"}]))
    with llm.feed() as feed:
        feed.add("x", SamplingParams())


def streaming(llm: LLM) -> None:
    for delta in llm.stream("x"):
        delta.txt  # type: ignore[attr-defined] # noqa: B018
        assert_type(delta, Delta)

    async def main() -> None:
        for _ in llm.astream("x"):  # type: ignore[attr-defined]
            pass
        async for delta in llm.astream("x"):
            assert_type(delta.token_ids, tuple[int, ...])

    asyncio.run(main())


def answering_files(llm: LLM) -> None:
    run_batch("in.jsonl")  # type: ignore[call-arg]
    run_batch("in.jsonl", "out.jsonl", max_row=3)  # type: ignore[call-arg]
    run_batch("in.jsonl", "out.jsonl").num_line  # type: ignore[attr-defined] # noqa: B018
    assert_type(run_batch("in.jsonl", "out.jsonl", llm), BatchSummary)
    run_batch(Path("in.jsonl"), Path("out.jsonl"), "model", dtype="bfloat16", max_rows=4)
