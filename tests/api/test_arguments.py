"""Arguments that a public call does not have, and flags that are neither True nor False: one line each."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, run_batch
from hybrid_jax.api.feed import Feed

TOLD = lambda done, total: None  # noqa: E731
INTO = "it belongs into SamplingParams: sampling_params=SamplingParams("
FLAGS = [
    (call, name)
    for call in (*vars(LLM).values(), *vars(LLM.__base__).values())
    if inspect.isfunction(call) and not call.__name__.startswith("_")
    for name, parameter in inspect.signature(call).parameters.items()
    if "bool" in str(parameter.annotation) or parameter.annotation == "ProgressOption"
]


def test_all_flags_of_all_calls_are_looked_at():
    names = {f"{call.__name__} {name}" for call, name in FLAGS}
    assert {"embed normalize", "encode add_special_tokens", "decode skip_special_tokens"} < names
    assert {"generate use_tqdm", "chat progress", "warmup penalties", "score progress"} < names


@pytest.mark.parametrize(("call", "name"), FLAGS)
@pytest.mark.parametrize("value", ["yes", "False", 1, 0.0, []])
def test_a_flag_is_true_or_false(call, name, value):
    text = f"LLM.{call.__name__}: {name} must be True or False"
    with pytest.raises(
        ValueError, match=f"^{re.escape(text)}.*, got {re.escape(repr(value))}; "
    ) as e:
        call(None, **{name: value})
    assert "\n" not in str(e.value)


def test_flags_of_the_object_itself():
    for make in (LLM, lambda **given: LLM.from_params(None, None, **given)):
        with pytest.raises(ValueError, match="quiet must be True or False, got 'no'; give one of"):
            make(quiet="no")
    with pytest.raises(
        ValueError, match="LLM: progress must be True or False, None, or a function"
    ):
        LLM(progress="no")
    with pytest.raises(ValueError, match="run_batch: progress must be True or False, None, or a"):
        run_batch("in", "out", progress="no")


def test_right_flags_are_taken(llm):
    assert llm.encode("ab", add_special_tokens=np.bool_(False)) == llm.encode("ab")
    for options in ({"use_tqdm": None}, {"use_tqdm": np.True_}, {"progress": TOLD}):
        llm.generate("ab", SamplingParams(max_tokens=1), **options)


@pytest.mark.parametrize(
    ("call", "name", "says"),
    [
        (LLM.generate, "temperature", f"{INTO}temperature=...)"),
        (LLM.generate, "seed", f"{INTO}seed=...)"),
        (LLM.stream, "max_tokens", f"{INTO}max_tokens=...)"),
        (LLM.astream, "stop", f"{INTO}stop=...)"),
        (Feed.add, "top_p", f"{INTO}top_p=...)"),
        (LLM.chat, "temperature", f"{INTO}temperature=...)"),
        (LLM.stream_chat, "logprobs", f"{INTO}logprobs=...)"),
        (LLM.generate, "temperatur", f"if you mean temperature, {INTO}temperature=...)"),
        (LLM.chat, "temperatur", f"if you mean temperature, {INTO}temperature=...)"),
        (LLM.generate, "max_new_tokens", "in SamplingParams it is max_tokens"),
        (LLM.generate, "guided_json", "in SamplingParams it is structured_outputs=Structured"),
        (LLM.generate, "tools", "it is one of LLM.chat, which takes messages"),
        (LLM.generate, "prompt", "did you mean prompts?"),
        (LLM.chat, "message", "did you mean messages?"),
        (LLM.chat, "enable_thinking", "did you mean chat_template_kwargs={...}, for what the"),
        (LLM.generate, "max_rows", "it belongs to the model: LLM(max_rows=...)"),
        (LLM.score, "temperature", "nothing is generated here, so leave it out"),
        (LLM.score, "prompt", "did you mean prompts?"),
        (LLM.logprobs, "position", "did you mean positions?"),
        (LLM.embed, "normalise", "did you mean normalize?"),
        (LLM.embed, "zzz", "it has errors, normalize, pooling, progress, prompts"),
        (LLM.warmup, "thread", "did you mean threads?"),
        (LLM.encode, "add_special_token", "did you mean add_special_tokens?"),
        (LLM.reset_prefix_cache, "zzz", "it takes none"),
    ],
)
def test_an_unknown_argument_is_named_with_its_place(call, name, says):
    with pytest.raises(TypeError, match=re.escape(f"{name!r}; {says}")) as error:
        call(None, **{name: 1})
    assert str(error.value).startswith("Feed.add" if call is Feed.add else "LLM.")
    assert "\n" not in str(error.value)


def test_what_is_not_built_is_said():
    with pytest.raises(NotImplementedError, match="LLM.generate: lora_request: LoRA is not built"):
        LLM.generate(None, "a", lora_request=1)  # type: ignore[call-arg]


def test_signatures_are_those_of_the_calls():
    assert list(inspect.signature(LLM.embed).parameters) == [
        *("self", "prompts", "pooling", "normalize", "progress", "errors")
    ]
    assert str(inspect.signature(LLM.encode)) == (
        "(self, text: 'str', *, add_special_tokens: 'bool' = True) -> 'list[int]'"
    )
    assert list(inspect.signature(LLM).parameters)[:2] == ["model", "dtype"]
    assert (
        LLM.generate.__doc__.startswith("Completes prompts") and LLM.generate.__name__ == "generate"
    )
