"""What goes to and comes from a worker process survives it: values are equal, errors keep all they say."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from hybrid_jax import (
    BatchSummary,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    StructuredOutputsParams,
)
from hybrid_jax.config import Mamba2, ModelConfig, residual_layer
from hybrid_jax.geometry import make_geometry
from hybrid_jax.openai.errors import RequestError
from hybrid_jax.sizing.budget import split_memory
from hybrid_jax.text.prompts import read_prompts
from tests.imports import SOURCES
from tests.llms import byte_tokenizer

PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.9,
    logit_bias={3: -1.0},
    allowed_token_ids=[3, 4],
    bad_words=["no"],
    stop=["x", "y"],
    stop_token_ids=[7],
    max_tokens=9,
    seed=5,
    logprobs=2,
    output_kind="cumulative",
)
FORMS = [
    StructuredOutputsParams(json={"type": "integer"}),
    StructuredOutputsParams(regex="a+"),
    StructuredOutputsParams(choice=["a", "b"]),
    StructuredOutputsParams(grammar="start: /a/"),
    StructuredOutputsParams(json_object=True),
]
CONFIG = ModelConfig(
    family="mamba2",
    vocab_size=256,
    width=8,
    layers=(residual_layer(mixers=(Mamba2(num_heads=2, head_dim=8, state_size=8, num_groups=1),)),),
)
ENGINE = EngineConfig(max_rows=3, memory=2**22, cache=CacheConfig(policy="off"))
GEOMETRY = make_geometry(CONFIG, ENGINE)
SETTINGS = [CONFIG, ENGINE, GEOMETRY, split_memory(CONFIG, ENGINE, GEOMETRY)]
SETTINGS += [BatchSummary(input="a", output="b", num_lines=3)]
PROMPTS = [
    "text",
    {"prompt": "text"},
    {"prompt_token_ids": (1, 2)},
    *read_prompts(["text", [1, 2]], byte_tokenizer(), vocab_size=256),
]
ERRORS = [
    thing
    for module in SOURCES
    if not module.endswith(("__main__", "triton_kernel"))  # triton may be missing
    for thing in vars(importlib.import_module(module)).values()
    if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__ == module
]


def there_and_back(value):
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def outputs(llm):
    """Everything a caller gets: whole outputs, deltas, one that is not finished, an explanation."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, stop="fox")
    whole = llm.generate(["ab", [97, 98]], [greedy, SamplingParams(n=2, max_tokens=3)])
    deltas = list(llm.stream("ab", greedy))
    with llm.feed() as feed:
        ticket = feed.add("ab", SamplingParams(max_tokens=100))
        feed.step()
        unfinished = ticket.outputs()
    assert whole[0].outputs[0].logprobs and deltas[-1].output
    assert not unfinished[0].outputs[0].finished()
    return [*whole, *deltas, *unfinished, llm.cache.explain(whole[0].request_id)]


@pytest.mark.parametrize(
    "value", [PARAMS, SamplingParams(structured_outputs=FORMS[0]), *FORMS, *SETTINGS, *PROMPTS]
)
def test_what_goes_to_a_worker_comes_back_equal(value):
    back = there_and_back(value)
    assert (type(back), back) == (type(value), value)


def test_what_comes_from_a_worker_comes_back_equal(outputs):
    back = there_and_back(outputs)
    assert back == outputs
    assert list(map(repr, back)) == list(map(repr, outputs))


def test_another_process_reads_them_without_jax(outputs, root):
    code = (
        "import pickle, sys\n"
        "values = pickle.load(sys.stdin.buffer)\n"
        "pickle.dump((values, 'jax' in sys.modules), sys.stdout.buffer)"
    )
    given = [PARAMS, CONFIG, ENGINE, GEOMETRY, *FORMS, *PROMPTS[:3], *outputs[:-1]]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(given),
        capture_output=True,
        check=True,
        cwd=root,
    )
    assert pickle.loads(done.stdout) == (given, False)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_of_any_kind_keeps_what_it_says(kind):
    error = kind("where: what must hold, got 7")
    error.add_note("while it did this")
    back = there_and_back(error)
    assert (type(back), back.args, vars(back)) == (kind, error.args, vars(error))


def test_an_error_keeps_its_attributes():
    back = there_and_back(RequestError("n is 0", code="wrong", param="n", status=500))
    assert (str(back), back.code, back.param, back.status) == ("n is 0", "wrong", "n", 500)


def test_a_refusal_survives_as_it_was_raised(llm):
    with pytest.raises(ValueError) as raised:
        llm.generate("x" * 199, SamplingParams(max_tokens=2))
    back = there_and_back(raised.value)
    assert (type(back), str(back)) == (type(raised.value), str(raised.value))
    assert "lower max_tokens to 1" in str(back)


def test_a_tokenizer_that_has_rendered_a_chat_is_the_same_elsewhere():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages)
    back = there_and_back(tokenizer)
    assert back.encode("é") == tokenizer.encode("é")
    assert back.apply_chat_template(messages) == text


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_stays_where_it_was_made(llm, carry):
    with pytest.raises(
        TypeError, match="LLM: .* neither be pickled nor copied; make it inside the"
    ):
        carry(llm)
    assert llm.generate("ab", SamplingParams(max_tokens=1))
