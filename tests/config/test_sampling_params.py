"""What a caller may ask of the sampler, and the message for what it may not."""

import copy
import inspect
import math
import pickle
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.config import CacheConfig
from hybrid_jax.config.other_names import TABLES, other_names
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.structured_outputs import FORMS, StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "value", "must_be"),
    [
        ("n", 0, "an integer between 1 and 1024"),
        ("n", 1.0, "an integer between 1 and 1024"),
        ("n", True, "an integer between 1 and 1024"),
        ("n", 1025, "an integer between 1 and 1024"),
        ("temperature", -0.1, "0 or a number between 1e-06 and 1000000"),
        ("temperature", 1e-7, "0 or a number between 1e-06 and 1000000"),
        ("temperature", 1e300, "0 or a number between 1e-06 and 1000000"),
        ("temperature", math.nan, "0 or a number between 1e-06 and 1000000"),
        ("temperature", math.inf, "0 or a number between 1e-06 and 1000000"),
        ("temperature", "hot", "0 or a number between 1e-06 and 1000000"),
        ("top_k", -2, "an integer between -1 and 2147483647"),
        ("top_k", 2.5, "an integer between -1 and 2147483647"),
        ("top_k", 2**31, "an integer between -1 and 2147483647"),
        ("top_k", np.bool_(True), "an integer between -1 and 2147483647"),
        ("temperature", True, "0 or a number between 1e-06 and 1000000"),
        ("top_p", 0.0, "a number above 0 and at most 1"),
        ("top_p", 1.01, "a number above 0 and at most 1"),
        ("top_p", math.nan, "a number above 0 and at most 1"),
        ("seed", -1, "None or an integer between 0 and 9223372036854775807"),
        ("seed", 2**63, "None or an integer between 0 and 9223372036854775807"),
        ("max_tokens", 0, "None or an integer of at least 1"),
        ("max_tokens", math.inf, "None or an integer of at least 1"),
        ("stop", ("ok", ""), "non-empty strings"),
        ("stop", (3,), "non-empty strings"),
        ("stop", 3, "None or a list of strings"),
        ("stop", b"x", "None or a list of strings"),
        ("stop", ("\ud800",), "valid UTF-8"),
        ("bad_words", ("ok", "\udcff"), "valid UTF-8"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", None, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("include_stop_str_in_output", 0.0, "True or False"),
        ("stop_token_ids", (5, -1), "token ids >= 0"),
        ("stop_token_ids", ("a",), "token ids >= 0"),
        ("stop_token_ids", 7, "None or a list of token ids"),
        ("logprobs", -1, "None or an integer between 0 and 20 (LLM.logprobs reports all tokens)"),
        ("logprobs", 21, "None or an integer between 0 and 20 (LLM.logprobs reports all tokens)"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(field, value, must_be):
    message = f"SamplingParams: {field} must be {must_be}, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "field, strings, most, got",
    [
        ("stop", ("x",) * 1001, "1000 strings of 65536", "1001 of 1001"),
        ("stop", ("x" * 65537,), "1000 strings of 65536", "1 of 65537"),
        ("bad_words", ("x",) * 10_001, "10000 strings of 262144", "10001 of 10001"),
    ],
)
def test_too_many_strings_are_counted_and_not_printed(field, strings, most, got):
    with pytest.raises(
        ValueError, match=f"{field} must be at most {most} characters together, got {got}$"
    ):
        SamplingParams(**{field: strings})
    assert getattr(SamplingParams(**{field: strings[: 1 - len(strings)] or "x" * 65536}), field)


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("max_token", TypeError, "unknown field 'max_token'; did you mean max_tokens?"),
        ("temprature", TypeError, "unknown field 'temprature'; did you mean temperature?"),
        ("max_new_tokens", TypeError, "unknown field 'max_new_tokens'; did you mean max_tokens?"),
        ("do_sample", TypeError, "'do_sample'; did you mean temperature (0 is greedy)?"),
        ("best_of", TypeError, "'best_of'; did you mean n (all completions are returned, none is"),
        ("guided_json", TypeError, "mean structured_outputs=StructuredOutputsParams(json=...)?"),
        ("guided_regex", TypeError, "mean structured_outputs=StructuredOutputsParams(regex=...)?"),
        ("colour", TypeError, "unknown field 'colour'; it has allowed_token_ids, bad_words, "),
        ("num_beams", NotImplementedError, "num_beams: beam search is not built yet; leave it out"),
        ("typical_p", NotImplementedError, "typical_p: typical sampling is not built yet; leave"),
    ],
)
def test_an_unknown_field_is_named_with_what_was_meant(name, error, message):
    with pytest.raises(error, match=f"^SamplingParams: .*{re.escape(message)}"):
        SamplingParams(**{name: 2})


@pytest.mark.parametrize("cls", [SamplingParams, StructuredOutputsParams, CacheConfig])
def test_every_name_of_another_engine_leads_to_one_of_ours(cls):
    ours, names, where = cls.__dataclass_fields__.keys(), other_names(cls.__name__), cls.__name__
    assert {re.match(r"\w+", meant)[0] for meant in names["ours"].values()} <= ours
    assert not {*names["ours"], *names["later"]} & ours
    assert not names["ours"].keys() & names["later"].keys()
    for name in names["ours"]:
        with pytest.raises(TypeError, match=f"^{where}: unknown field '{name}'; did you mean"):
            cls(**{name: 1})


def test_forms_in_hints_are_fields_of_structured_outputs():
    hints = " ".join(other_names("SamplingParams")["ours"].values())
    forms = set(re.findall(r"StructuredOutputsParams\((\w+)=", hints))
    assert forms == set(FORMS)


def test_the_wheel_has_the_names_of_other_engines(root):
    package = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = package["package-data"]["hybrid_jax"]
    assert any(TABLES.relative_to(root / "hybrid_jax").match(glob) for glob in globs)


def test_copies_of_params_are_made_as_of_any_dataclass():
    params = SamplingParams(temperature=0.5, stop="x", max_tokens=3)
    assert replace(params, max_tokens=4) == SamplingParams(temperature=0.5, stop="x", max_tokens=4)
    assert (
        copy.copy(params) == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    )
    with pytest.raises(TypeError, match="unknown field 'max_token'; did you mean max_tokens?"):
        replace(params, max_token=4)  # type: ignore[call-arg]


def test_the_signature_shows_the_fields():
    fields = list(SamplingParams.__dataclass_fields__)
    assert list(inspect.signature(SamplingParams).parameters) == fields
    with pytest.raises(TypeError, match="positional argument"):
        SamplingParams(3)


def test_bounds_themselves_are_allowed():
    params = SamplingParams(
        temperature=0, top_k=-1, top_p=1, seed=2**63 - 1, max_tokens=1, logprobs=20
    )
    assert params.greedy and not SamplingParams(temperature=1e-6).greedy


def test_no_temperature_is_one_for_the_engine_and_not_greedy():
    params = SamplingParams()
    assert (params.temperature, params.engine_temperature, params.greedy) == (None, 1.0, False)
    assert SamplingParams(temperature=0.0).engine_temperature == 0


def test_stops_become_tuples_so_that_the_value_can_be_hashed():
    assert SamplingParams(stop="end").stop == ("end",)
    listed = SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4])
    assert listed.stop == ("a", "b") and listed.stop_token_ids == (3, 4)
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    assert hash(listed) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4)))


def test_numbers_of_numpy_become_pythons_own():
    given = SamplingParams(
        n=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(7),
        top_p=np.float64(0.5),
        seed=np.uint8(9),
        stop_token_ids=np.array([4, 5]),
        ignore_eos=np.bool_(True),
    )
    plain = SamplingParams(
        n=3, temperature=0.5, top_k=7, top_p=0.5, seed=9, stop_token_ids=(4, 5), ignore_eos=True
    )
    assert given == plain and repr(given) == repr(plain)


def test_a_number_past_all_floats_is_refused_in_few_words():
    with pytest.raises(ValueError, match=r"temperature must be 0 or a number between") as error:
        SamplingParams(temperature=10**400)
    assert len(str(error.value)) < 150


def test_the_largest_counts_are_allowed():
    assert SamplingParams(n=1024, top_k=2**31 - 1).top_k == 2**31 - 1


def test_a_logit_bias_that_is_no_dict_is_named():
    message = "SamplingParams: logit_bias must be a dict from token ids to numbers, got [(1, 2.0)]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(logit_bias=[(1, 2.0)])
    assert SamplingParams(logit_bias=((1, 2.0),)).logit_bias == ((1, 2.0),)
