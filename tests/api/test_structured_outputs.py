"""Constrained completions of the bundled model, from text to text."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace

import pytest

from hybrid_jax import LLM, SamplingParams, StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from tests.constraints.thinking import ALWAYS, LFM2, marked_tokenizer
from tests.drawing import left_to_all
from tests.llms import tiny_llm
from tests.tiny_models import redrawn, tiny_model

HEAD = "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["file", "folder", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
RECORD = StructuredOutputsParams(json=SCHEMA)
VERSION = StructuredOutputsParams(regex=r"v[0-9]{1,3}(\.[0-9]{1,2}){2}")


@pytest.fixture
def llm(bundled):
    bundled.reset_prefix_cache()
    return bundled


@pytest.fixture(scope="module")
def tiny(bundled):
    with tiny_llm(tokenizer=bundled.get_tokenizer()) as llm:
        yield llm


def is_record(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "kind", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 10
        and type(value["size"]) is int
        and 0 <= value["size"] <= 99
        and value["kind"] in ("file", "folder", None)
        and len(value["tags"]) <= 3
        and all(type(tag) is bool for tag in value["tags"])
    )


@pytest.mark.parametrize("model, n", [("llm", 1), ("tiny", 6)])
@left_to_all("llm-1")
def test_every_completion_under_a_schema_is_valid(request, model, n):
    """A model with drawn weights is fast, and the form alone makes its texts valid."""
    prompts = [HEAD, "record = ", "{", "def f(x):\n    return "]
    form = {"max_tokens": 320, "structured_outputs": RECORD}
    greedy = SamplingParams(temperature=0.0, **form)
    drawn = SamplingParams(temperature=1.3, seed=1, n=n, **form)
    llm = request.getfixturevalue(model)
    outputs = llm.generate([*prompts, *prompts], [greedy] * 4 + [drawn] * 4)
    completions = [c for output in outputs for c in output.outputs]
    assert len(completions) == 4 + 4 * n
    assert {(c.finish_reason, c.stop_reason) for c in completions} == {("stop", None)}
    assert [c.text for c in completions if not is_record(c.text)] == []
    assert len({c.text for c in completions}) > len(completions) // 2


@pytest.mark.parametrize(
    "form, pattern",
    [
        (VERSION, VERSION.regex),
        (StructuredOutputsParams(choice=["yes", "no", "it depends"]), "yes|no|it depends"),
        (
            StructuredOutputsParams(
                grammar='start: pair ("; " pair)~2\npair: /[a-z]{1,4}/ "=" /[01]/'
            ),
            "([a-z]{1,4}=[01]; ){2}[a-z]{1,4}=[01]",
        ),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_a_text_has_the_form_that_was_asked_for(llm, form, pattern):
    params = SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=60, structured_outputs=form)
    [output] = llm.generate("version = ", params)
    for completion in output.outputs:
        assert re.fullmatch(pattern, completion.text), completion
        assert completion.finish_reason == "stop"


def test_a_constrained_row_changes_nothing_for_the_rows_beside_it(llm):
    params = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=4, max_tokens=120, structured_outputs=RECORD),
        SamplingParams(temperature=0.8, seed=5, max_tokens=40),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=VERSION),
        SamplingParams(temperature=0.0, max_tokens=40, bad_words=["self", "e"]),
        SamplingParams(temperature=0.9, seed=6, max_tokens=40, structured_outputs=VERSION),
    ]
    prompts = [HEAD + "    def read(self):\n", *["x = ", "import ", HEAD, HEAD, HEAD]]
    alone = [llm.generate(p, own)[0].outputs[0] for p, own in zip(prompts, params, strict=True)]
    llm.reset_prefix_cache()
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]


def test_streamed_pieces_join_to_the_constrained_text(llm):
    params = SamplingParams(temperature=0.7, seed=9, max_tokens=320, structured_outputs=RECORD)
    [expected] = llm.generate("data = ", params)
    pieces = [delta.text for delta in llm.stream("data = ", params)]
    assert "".join(pieces) == expected.outputs[0].text and len(pieces) > 10


def test_a_constrained_stream_goes_on_after_a_turn_that_failed(llm, monkeypatch):
    params = SamplingParams(temperature=0.7, seed=9, max_tokens=320, structured_outputs=RECORD)
    [expected] = llm.generate("data = ", params)
    deltas = llm.stream("data = ", params)
    found = [next(deltas) for _ in range(12)]
    real, failed = llm._engine.step, []

    def failing():
        results = real()
        if "def f(" in prompts_of(llm) and not failed:
            failed.append(len(results))
            raise RuntimeError("device lost")
        return results

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate("def f(", SamplingParams(temperature=0.0, max_tokens=8))
    found += deltas
    assert "".join(delta.text for delta in found) == expected.outputs[0].text


def prompts_of(llm):
    """The prompts in the engine, as texts."""
    return [bytes(request.prompt).decode() for request in llm._engine._live.values()]


def test_a_preempted_text_keeps_its_form():
    words = {"type": "string", "pattern": "^[a-z]{6,8}$"}
    form = StructuredOutputsParams(
        json={"type": "array", "minItems": 10, "maxItems": 12, "items": words}
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=250, structured_outputs=form)
    prompts = [f"x{index} = " for index in range(4)]
    with tiny_llm(memory="180KB") as small:
        alone = [small.generate(prompt, params)[0] for prompt in prompts]
        small.reset_prefix_cache()
        outputs = small.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 2
    assert sum(output.metrics.num_preemptions for output in alone) == 0
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [output.outputs[0].text for output in alone]
    for text in texts:
        assert all(re.fullmatch("[a-z]{6,8}", word) for word in json.loads(text))


def test_the_end_token_ends_a_text_that_might_go_on(llm):
    form = StructuredOutputsParams(regex="[a-z]+")
    [eos] = llm.model_config.eos_token_ids
    params = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=form, logit_bias={eos: 100.0}
    )
    [ended], [went_on] = (
        llm.generate("x", params)[0].outputs,
        llm.generate(
            "x",
            SamplingParams(
                temperature=0.0, max_tokens=12, structured_outputs=form, ignore_eos=True
            ),
        )[0].outputs,
    )
    assert re.fullmatch("[a-z]", ended.text) and ended.finish_reason == "stop"
    assert ended.token_ids[-1] == eos and len(ended.token_ids) == 2
    assert re.fullmatch("[a-z]{12}", went_on.text) and went_on.finish_reason == "length"


def test_bad_words_do_not_appear(llm):
    free = SamplingParams(temperature=0.0, max_tokens=60)
    [plain] = llm.generate(HEAD, free)
    words = ["e", "self", "return"]
    assert all(word in plain.outputs[0].text for word in words[:2]), plain
    for params in (
        SamplingParams(temperature=0.0, max_tokens=120, bad_words=words),
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=120, bad_words=words),
    ):
        for completion in llm.generate(HEAD, params)[0].outputs:
            assert not any(word in completion.text for word in words), completion.text


def test_a_text_that_cannot_go_on_says_why(llm):
    params = SamplingParams(
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(choice=["foo", "fax"]),
        bad_words=["oo", "ax"],
    )
    [completion] = llm.generate("x", params)[0].outputs
    assert completion.text in ("fo", "fa") and completion.finish_reason == "abort"
    assert completion.stop_reason == "no token that may come next is allowed"


def test_a_wrong_form_stops_the_call_before_anything_runs(llm):
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
    before = llm.stats() | {"peak_memory_bytes": None}
    with pytest.raises(
        ValueError, match="prompt 1: structured_outputs.json .* not {} at # is not supported"
    ):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=4), wrong])
    assert llm.stats() | {"peak_memory_bytes": None} == before


def test_other_tasks_go_on_while_a_new_form_is_tried(llm, monkeypatch):
    tried, began, go_on = Grammars._tried, threading.Event(), threading.Event()

    def slow(self, wanted):
        began.set()
        assert go_on.wait(60), "the other request ends meanwhile"
        return tried(self, wanted)

    monkeypatch.setattr(Grammars, "_tried", slow)
    form = StructuredOutputsParams(regex="[cd]{3}")
    params = SamplingParams(max_tokens=9, seed=1, structured_outputs=form)

    async def last_of(deltas):
        return [delta async for delta in deltas][-1].output

    async def main():
        waiting = asyncio.create_task(last_of(llm.astream(HEAD, params)))
        while not began.is_set():
            await asyncio.sleep(0.01)
        other = await last_of(llm.astream(HEAD, SamplingParams(max_tokens=2)))
        go_on.set()
        return await waiting, other

    formed, other = asyncio.run(main())
    assert re.fullmatch("[cd]{3}", formed.outputs[0].text)
    assert int(formed.request_id) + 1 == int(other.request_id)  # in the order of the calls
    monkeypatch.setattr(Grammars, "_tried", None)
    again = asyncio.run(last_of(llm.astream(HEAD, params)))
    assert again.outputs[0].text == formed.outputs[0].text
    monkeypatch.setattr(Grammars, "_tried", tried)
    wrong = replace(params, structured_outputs=StructuredOutputsParams(regex="[cd"))
    with pytest.raises(ValueError, match=r"prompt 0: .*\[cd"):
        asyncio.run(last_of(llm.astream(HEAD, wrong)))


def test_a_model_that_likes_to_think_thinks_first():
    opens, closes = 256, 257
    config = replace(tiny_model("bamba")[0], vocab_size=258, max_position=1024, eos_token_ids=(0,))
    tokenizer = marked_tokenizer()
    llm = LLM.from_params(
        config,
        redrawn(config, seed=0),
        quiet=True,
        max_rows=4,
        prefill_tokens=32,
        tokenizer=tokenizer,
    )
    messages = [{"role": "user", "content": "hi"}]

    def texts(template, bias, form=VERSION):
        params = SamplingParams(
            max_tokens=40, temperature=0.8, seed=3, n=2, logit_bias=bias, structured_outputs=form
        )
        [output] = llm.chat(messages, params, chat_template=template)
        return [(c.text, c.finish_reason) for c in output.outputs]

    often = {closes: 100.0, opens: 99.0}
    for template in (ALWAYS, LFM2):
        for text, reason in texts(template, often):
            thoughts, mark, version = text.rpartition("</think>")
            assert mark and re.fullmatch(r"\s{0,2}" + VERSION.regex, version) and reason == "stop"
            assert thoughts.startswith("<think>") == (template is LFM2)
    # The thoughts never end; nor does the model's own end token end them.
    for text, reason in texts(ALWAYS, {closes: -100.0, 0: 100.0}):
        assert reason == "length" and "</think>" not in text
    for text, reason in texts(ALWAYS, often, replace(VERSION, after_thoughts=False)):
        assert re.fullmatch(VERSION.regex, text) and reason == "stop"
    llm.close()
