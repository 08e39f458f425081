"""Weights that are not finite: requests that meet them end with an error that says so, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, SpeculationConfig, StructuredOutputsParams, run_batch
from hybrid_jax.api.reading import all_logprobs
from hybrid_jax.schedule.suffix import Draft, SuffixDrafter
from tests.batch.batch_files import line, read, write
from tests.drawing import left_to_all
from tests.llms import byte_tokenizer
from tests.tiny_models import redrawn, tiny_model

GOOD, BAD = "and so on, ", "quite so, "  # the second has a token whose embedding is damaged
DAMAGED = ord("q")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
KEPT = (97, 98, 99)  # tokens that may be drawn where the damaged one may not
WORDS = "not finite"


def damaged_llm(
    place: tuple = ("embed",), row: int | slice = DAMAGED, value: float = math.nan, **options
) -> LLM:
    """A tiny hybrid with a damaged array; its logits do not use the embeddings."""
    config = replace(
        tiny_model("bamba")[0], vocab_size=256, max_position=1024, tie_embeddings=False
    )
    params = redrawn(config, seed=0)
    *path, name = place
    holder = params
    for step in path:
        holder = holder[step]
    holder[name] = holder[name].at[row].set(value)
    if (dtype := options.get("dtype")) is not None:
        params = jax.tree.map(lambda array: array.astype(dtype), params)
    given = {"max_rows": 4, "prefill_tokens": 32, "tokenizer": byte_tokenizer()} | options
    return LLM.from_params(config, params, quiet=True, **given)


@pytest.fixture(scope="module")
def llm():
    with damaged_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def sound():
    """What the same model without the damage says."""
    with damaged_llm(row=slice(0)) as llm:
        yield llm


def text(output) -> str:
    return output.outputs[0].text


CALLS = {
    "generate": lambda llm, prompt: llm.generate(prompt, GREEDY),
    "sampled": lambda llm, prompt: llm.generate(prompt, SamplingParams(seed=1, max_tokens=6)),
    "top_k": lambda llm, prompt: llm.generate(
        prompt, SamplingParams(top_k=5, seed=1, max_tokens=6)
    ),
    "several completions": lambda llm, prompt: llm.generate(
        prompt, SamplingParams(n=2, seed=1, max_tokens=6)
    ),
    "log-probabilities": lambda llm, prompt: llm.generate(prompt, replace(GREEDY, logprobs=2)),
    "of the prompt": lambda llm, prompt: llm.generate(prompt, replace(GREEDY, prompt_logprobs=1)),
    "penalties": lambda llm, prompt: llm.generate(prompt, replace(GREEDY, presence_penalty=1.0)),
    "few tokens allowed": lambda llm, prompt: llm.generate(
        prompt, replace(GREEDY, allowed_token_ids=KEPT)
    ),
    "a form": lambda llm, prompt: llm.generate(
        prompt, replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
    ),
    "stream": lambda llm, prompt: list(llm.stream(prompt, GREEDY)),
    "astream": lambda llm, prompt: asyncio.run(last_of(llm.astream(prompt, GREEDY))),
    "feed": lambda llm, prompt: fed(llm, prompt),
    "score": lambda llm, prompt: llm.score(prompt, "so on"),
    "score of it": lambda llm, prompt: llm.score("x", prompt),
    "embed": lambda llm, prompt: llm.embed(prompt),
    "mean": lambda llm, prompt: llm.embed(prompt, pooling="mean"),
    "hidden states": lambda llm, prompt: llm.embed(prompt, pooling="none"),
    "all next tokens": lambda llm, prompt: llm.logprobs(prompt),
    "all next tokens everywhere": lambda llm, prompt: llm.logprobs(prompt, positions="all"),
}


async def last_of(deltas):
    async with contextlib.aclosing(deltas):
        return [delta async for delta in deltas][-1]


def fed(llm: LLM, prompt: str):
    with llm.feed() as feed:
        ticket = feed.add(prompt, GREEDY)
        while not ticket.finished:
            feed.step()
        return ticket.outputs()


@pytest.mark.parametrize("name", CALLS)
def test_every_call_says_so(llm, name):
    with pytest.raises(FloatingPointError, match=f"prompt 0: .*{WORDS}.* weights embed hold"):
        CALLS[name](llm, BAD)
    CALLS[name](llm, GOOD)


def test_other_prompts_get_what_they_would_have_got(llm, sound):
    prompts = [GOOD, BAD, GOOD + "then", BAD + "too", "x" * 70]
    outputs = llm.generate(prompts, GREEDY, errors="return")
    assert [isinstance(output, FloatingPointError) for output in outputs] == [0, 1, 0, 1, 0]
    assert str(outputs[3]).startswith("prompt 3: ")
    want = sound.generate(prompts, GREEDY)
    for place in (0, 2, 4):
        assert text(outputs[place]) == text(want[place])


def test_weights_that_cannot_be_looked_at_end_no_other_call(llm, monkeypatch):
    def fail(params):
        raise MemoryError("no room")

    monkeypatch.setattr("hybrid_jax.engine.damage.not_finite", fail)
    vars(llm._engine).pop("damaged_weights", None)
    with pytest.raises(FloatingPointError, match=f"{WORDS}.*; the weights could not be looked at"):
        llm.generate(BAD, GREEDY)
    assert text(llm.generate(GOOD, GREEDY)[0])


def test_a_call_beside_it_goes_on(llm, sound):
    stream = llm.stream(GOOD, replace(GREEDY, max_tokens=40))
    first = next(stream)
    with pytest.raises(FloatingPointError):
        llm.generate(BAD, GREEDY)
    rest = "".join(delta.text for delta in stream)
    assert first.text + rest == text(sound.generate(GOOD, replace(GREEDY, max_tokens=40))[0])


def test_a_token_that_is_drawn_ends_it_later(llm):
    """The damaged token is drawn: the next step reads its embedding."""
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={DAMAGED: 100})
    with pytest.raises(FloatingPointError, match="after 11 tokens of prompt and 1 new ones"):
        llm.generate(GOOD, params)


def test_nothing_of_it_is_kept(llm):
    llm.reset_prefix_cache()
    with pytest.raises(FloatingPointError):
        llm.generate(BAD + "x" * 90, GREEDY)
    assert not any(node.cached for node in llm.cache.nodes())
    llm.generate(GOOD + "x" * 90, GREEDY)
    assert any(node.cached for node in llm.cache.nodes())


def test_errors_come_back_in_place(llm, sound):
    scores = llm.score([GOOD, BAD, ""], ["so on", "so on", "so on"], errors="return")
    assert scores[0] == sound.score(GOOD, "so on")[0]
    assert isinstance(scores[1], FloatingPointError)
    assert isinstance(scores[2], ValueError) and "prompt 2" in str(scores[2])
    vectors = llm.embed([BAD, GOOD, 5], errors="return")
    assert isinstance(vectors[0], FloatingPointError) and isinstance(vectors[2], ValueError)
    np.testing.assert_array_equal(vectors[1], sound.embed(GOOD)[0])
    all_tokens = llm.logprobs([BAD, GOOD], errors="return")
    assert isinstance(all_tokens[0], FloatingPointError)
    np.testing.assert_array_equal(all_tokens[1], sound.logprobs(GOOD)[0])
    assert llm.generate([], errors="return") == []
    assert llm.embed([], errors="return") == []
    too_long = llm.generate([GOOD, "x" * 2000], GREEDY, errors="return")
    assert text(too_long[0]) and "2000 tokens" in str(too_long[1])
    with pytest.raises(ValueError, match="errors must be 'raise' or 'return', got 'ignore'"):
        llm.generate(GOOD, GREEDY, errors="ignore")
    with pytest.raises(ValueError, match="sampling_params: 2 prompts and 1 SamplingParams"):
        llm.generate([GOOD, BAD], [GREEDY], errors="return")


def test_a_sum_that_overflows_before_the_last_place_is_found():
    """The logits that the next token is drawn from are finite, and so are all hidden states."""

    def compute(part):
        return np.where(part[:, :1] == 7, np.inf, -1.0)

    states = np.arange(50.0)[:, None]
    hidden = [states[20:], ValueError("too long"), states]
    found = all_logprobs(hidden, 3, compute, lambda: "look there")
    np.testing.assert_array_equal(found[0], np.full((30, 3), -1.0))
    assert found[1] is hidden[1]
    assert isinstance(found[2], FloatingPointError)
    assert str(found[2]).startswith("prompt 2: ") and str(found[2]).endswith("; look there")


@pytest.mark.parametrize(
    "settings", [{}, {"exact": True, "max_rows": 2}, {"kv_cache_dtype": "fp8"}]
)
def test_a_draft_that_nobody_wants_spoils_nothing(monkeypatch, settings):
    """Each draft is the damaged token, which the model never draws here."""
    params = replace(GREEDY, max_tokens=30)
    with damaged_llm(**settings) as llm:
        want = text(llm.generate(GOOD, params)[0])
        assert chr(DAMAGED) not in want
    calls = []
    draft = lambda *_: calls.append(1) or Draft([DAMAGED] * 4, 4.0)
    monkeypatch.setattr(SuffixDrafter, "draft", draft)
    speculation = SpeculationConfig(method="suffix", shared=True, adaptive=False, num_tokens=4)
    with damaged_llm(speculation=speculation, **settings) as llm:
        outputs = llm.generate([GOOD, BAD, GOOD + "then", GOOD], params, errors="return")
        assert [isinstance(output, FloatingPointError) for output in outputs] == [0, 1, 0, 0]
        assert text(outputs[0]) == text(outputs[3]) == want
        assert calls


def test_a_batch_file_has_an_error_line_and_the_other_answers(llm, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": p, "max_tokens": 4, "temperature": 0} for p in (GOOD, BAD, GOOD + "x")]
    write(source, [line(str(n), **body) for n, body in enumerate(bodies)])
    summary = run_batch(source, target, llm, progress=False)
    answers = read(target)
    assert summary.num_errors == 1 and [a["error"] is None for a in answers] == [1, 0, 1]
    assert answers[1]["error"]["code"] == "not_finite" and WORDS in answers[1]["error"]["message"]
    json.dumps(answers, allow_nan=False)


PLACES = {
    "of attention": ("layers", 1, "mixers", 0, "qkv"),
    "of a recurrent layer": ("layers", 0, "mixers", 0, "in_proj"),
    "of its decays": ("layers", 0, "mixers", 0, "A_log"),
    "of an MLP": ("layers", 0, "mlp", "up"),
    "of a norm": ("norm",),
    "of the logits": ("head",),
}
SETTINGS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "exact": {"exact": True, "max_rows": 2},
    "drafts": {"speculation": "ngram"},
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("place", PLACES)
@left_to_all
def test_damage_is_found_wherever_it_is(place, settings, value):
    if place == "of its decays" and math.isinf(value):
        # A layer that forgets at once, or never, makes finite numbers. A file with such a rate is refused.
        with damaged_llm(PLACES[place], 0, value, **SETTINGS[settings]) as llm:
            assert llm.generate(GOOD * 5, GREEDY)[0].outputs[0].finish_reason
        return
    look_at(place, settings, value)


@pytest.mark.parametrize(
    ("place", "settings", "value"),
    [
        ("of attention", "fp8", math.inf),
        ("of a recurrent layer", "bfloat16", math.nan),
        ("of the logits", "exact", math.nan),
        ("of an MLP", "drafts", -math.inf),
    ],
)
def test_damage_is_found(place, settings, value):
    look_at(place, settings, value)


def look_at(place: str, settings: str, value: float) -> None:
    with damaged_llm(PLACES[place], 0, value, **SETTINGS[settings]) as llm:
        name = ".".join(map(str, PLACES[place]))
        for call in ("generate", "sampled", "score", "embed"):
            if call == "embed" and place == "of the logits":
                continue  # vectors are made before
            with pytest.raises(FloatingPointError, match=f"weights {name} hold such values"):
                CALLS[call](llm, GOOD * 5)


def test_a_sum_that_overflows_is_told_from_damaged_weights():
    big = float(jnp.finfo(jnp.bfloat16).max)
    for dtype, remedy in (("bfloat16", "try dtype='float32'"), ("float32", "compare config.json")):
        with damaged_llm(("head",), slice(None), big, dtype=dtype) as llm:
            with pytest.raises(FloatingPointError, match=f"{WORDS}.*weights are finite.*{remedy}"):
                llm.generate(GOOD, GREEDY)
