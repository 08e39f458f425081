"""What `LLM` is told: options and names of other engines, values out of range, memory that is not there."""

from __future__ import annotations

import inspect
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hybrid_jax import LLM, CacheConfig, EngineConfig, SamplingParams
from hybrid_jax.api import llm as llm_module
from hybrid_jax.api import options, starting
from hybrid_jax.config.other_names import other_names
from hybrid_jax.engine import this_device
from hybrid_jax.sizing import devices
from tests.api.fake_engine import CONFIG
from tests.llms import tiny_llm

TIB = 2**40


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"max_row": 4}, TypeError, "unknown option 'max_row'; did you mean max_rows?"),
        ({"enable_prefix_caching": True}, TypeError, "did you mean cache (a policy, or 'off')?"),
        ({"gpu_memory_utilization": 0.9}, TypeError, "did you mean memory (bytes, or a size like"),
        ({"torch_dtype": "auto"}, TypeError, "did you mean dtype?"),
        (
            {"max_tokens": 9},
            TypeError,
            "did you mean SamplingParams(max_tokens=...), given to generate?",
        ),
        ({"max_logprobs": 5}, TypeError, "a request may ask for 20 of them; leave it out"),
        ({"hf_token": "x"}, TypeError, "nothing is downloaded; model is a directory; leave it out"),
        (
            {"zzz": 1},
            TypeError,
            "unknown option 'zzz'; it has cache, cache_dir, disk_memory, dtype, exact, grain",
        ),
        (
            {"data_parallel_size": 2},
            NotImplementedError,
            "running several copies of a model, or its layers on several devices is not built",
        ),
        (
            {"quantization": "fp8"},
            NotImplementedError,
            "LLM: quantization: weight quantisation is not",
        ),
        (
            {"draft_model": "x"},
            TypeError,
            "did you mean speculation ('draft:DIRECTORY' for a second",
        ),
        (
            {"kv_cache_dtype": "int8"},
            ValueError,
            "LLM: kv_cache_dtype must be auto or fp8, got 'int8'",
        ),
        (
            {"seed": -1},
            ValueError,
            "LLM: seed must be an integer between 0 and 9223372036854775807, got -1",
        ),
        ({"seed": 2**63}, ValueError, f"an integer between 0 and 9223372036854775807, got {2**63}"),
        ({"exact": "yes"}, ValueError, "LLM: exact must be True or False, got 'yes'"),
        ({"exact": 1}, ValueError, "LLM: exact must be True or False, got 1"),
        (
            {"max_model_len": 1},
            ValueError,
            "max_model_len must be at least 2, a prompt's token and",
        ),
        ({"max_rows": 2.0}, ValueError, "LLM: max_rows must be an integer, got 2.0"),
    ],
)
def test_an_option_is_refused_in_one_step(make_llm, fake_model, given, error, message):
    for make in (make_llm, lambda **given: LLM(fake_model, **given)):
        with pytest.raises(error, match=re.escape(message)):
            make(**given)


def test_every_name_of_another_engine_leads_to_one_of_ours():
    ours = {*EngineConfig.__dataclass_fields__, *options.OWN_OPTIONS, "mesh"} - {"tp"}
    names = other_names("LLM")
    for name, other in names["ours"].items():
        assert name not in ours
        of_requests = re.match(r"SamplingParams\((\w+)=", other)
        if of_requests:
            assert of_requests[1] in SamplingParams.__dataclass_fields__
        else:
            assert other.split()[0] in ours
    assert not names["later"].keys() & {*ours, *names["ours"]}
    assert not names["needless"].keys() & {*ours, *names["ours"], *names["later"]}


@pytest.mark.parametrize(
    "name, meant",
    [("modle", "model"), ("quite", "quiet"), ("dtyp", "dtype"), ("progres", "progress")],
)
def test_a_slip_in_a_keyword_of_the_llm_itself_is_understood(fake_model, name, meant):
    with pytest.raises(TypeError, match=f"LLM: unknown option '{name}'; did you mean {meant}?"):
        LLM(fake_model, **{name: "x"})


@pytest.mark.parametrize("name", ["model", "progress"])
def test_weights_in_memory_take_neither_a_model_nor_progress(make_llm, name):
    with pytest.raises(TypeError, match=f"unknown option '{name}'") as raised:
        make_llm(**{name: True})
    assert f"mean {name}?" not in str(raised.value)
    with pytest.raises(TypeError, match="unknown option 'tokeniser'; did you mean tokenizer?"):
        make_llm(tokeniser=None)


def test_the_dtypes_of_an_llm_include_auto(fake_model):
    with pytest.raises(ValueError, match="dtype must be auto, float32 or bfloat16, got 'int4'"):
        LLM(fake_model, dtype="int4")


def test_what_a_cache_config_will_hold_later_is_named():
    with pytest.raises(TypeError, match=r"cache_dir: LLM\(cache_dir=...\) takes it; leave it out"):
        CacheConfig(cache_dir="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"host_memory: LLM\(host_memory=...\) takes it; leave"):
        CacheConfig(host_memory="2GiB")  # type: ignore[call-arg]
    for gone, instead in (("kv_quota", "one order of value"), ("watermarks", "stats\\(\\) counts")):
        with pytest.raises(TypeError, match=f"CacheConfig: {gone}: {instead} .*; leave it out"):
            CacheConfig(**{gone: (0.2, 0.8)})
    with pytest.raises(TypeError, match="CacheConfig: unknown field 'polcy'; did you mean policy?"):
        CacheConfig(polcy="lru")  # type: ignore[call-arg]
    assert list(inspect.signature(CacheConfig).parameters) == [*CacheConfig.__dataclass_fields__]


def test_numbers_of_numpy_become_pythons_own():
    given = EngineConfig(max_rows=np.int32(3), exact=np.bool_(True), seed=np.uint64(2**63 - 1))
    assert given == EngineConfig(max_rows=3, exact=True, seed=2**63 - 1)
    assert repr(given) == repr(EngineConfig(max_rows=3, exact=True, seed=2**63 - 1))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"speculation": "guess"},
            ValueError,
            "speculation must be one of off, ngram.* got 'guess'",
        ),
        (
            {"speculation": {"method": "ngram"}},
            ValueError,
            "LLM: speculation must be one of off, ngram.* or a SpeculationConfig, got {'method",
        ),
        ({"speculative_config": {}}, TypeError, "did you mean speculation .a method, or a"),
        ({"num_speculative_tokens": 3}, TypeError, "SpeculationConfig.num_tokens=...."),
        ({"quantize": "int3"}, ValueError, "quantize must be int8, fp8 or int4, got 'int3'"),
        (
            {"mesh": "2"},
            ValueError,
            "LLM: mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got '2'",
        ),
        ({"tp": 2}, TypeError, "did you mean mesh .like 'tp=4'"),
        ({"mesh": "tp=64"}, ValueError, "num_heads of .* layers must be a multiple of the devices"),
        ({"host_memory": "2 lots"}, ValueError, "host_memory: a size must look like 5GB"),
        ({"host_memory": -1}, ValueError, "host_memory: a size must look like 5GB"),
        (
            {"host_memory": "1KiB"},
            ValueError,
            "LLM: host_memory must hold a checkpoint and the pages of",
        ),
        (
            {"host_memory": "1GiB", "cache": "off"},
            ValueError,
            "LLM: host_memory must be 0 with cache='off', for it holds what the cache evicts, got 1073741824",
        ),
        (
            {"disk_memory": "1GiB"},
            ValueError,
            "LLM: disk_memory must be left out without cache_dir, got 1073741824",
        ),
        (
            {"exact": True, "cache": CacheConfig(checkpoints="int8")},
            ValueError,
            "LLM: exact=True does not go with checkpoints='int8', whose states are rounded",
        ),
        (
            {"cache": "best"},
            ValueError,
            "LLM: cache must be one of off, lru, .*, or alpha:X .*, got 'best'",
        ),
        ({"cache": "alpha:-1"}, ValueError, "alpha:X with a number X >= 0, .*got 'alpha:-1'"),
        ({"cache": 3}, ValueError, "LLM: cache must be one of .*got 3"),
        ({"max_num_seqs": 4}, TypeError, "'max_num_seqs'; did you mean max_rows"),
        (
            {"colour": 4},
            TypeError,
            "unknown option 'colour'; it has cache, cache_dir, disk_memory, dtype, exact",
        ),
        ({"memory": "lots"}, ValueError, "memory: a size must look like 5GB.*'lots'"),
        ({"max_rows": 0}, ValueError, "max_rows must be .*0"),
        ({"dtype": "int4"}, ValueError, "dtype must be .*'int4'"),
    ],
)
def test_bad_options_are_named(make_llm, fake_model, options, error, message):
    with pytest.raises(error, match=message):
        make_llm(**options)
    with pytest.raises(error, match=message):
        LLM(fake_model, **options)


def test_errors_of_a_start_name_what_the_caller_wrote(tmp_path):
    with pytest.raises(ValueError, match=r"^LLM: .* has no config.json"):
        LLM(tmp_path)
    with pytest.raises(
        ValueError, match="^LLM: memory must hold .*; raise memory or lower max_rows"
    ):
        tiny_llm(memory=1)


def test_options_reach_the_engine(make_llm):
    llm = make_llm(
        memory="1GiB", max_rows=3, cache="off", grain=16, exact=True, speculation="off", mesh=None
    )
    config = llm.engine_config
    assert (config.memory, config.max_rows, config.grain) == (2**30, 3, 16)
    assert config.cache == CacheConfig(policy="off")
    assert config.exact
    assert make_llm(cache=CacheConfig()).engine_config.cache.policy == "adaptive"
    for policy in ("adaptive", "marconi", "alpha:0.5"):
        assert make_llm(cache=policy).engine_config.cache.policy == policy


def test_weights_in_memory_use_the_compile_cache_too(make_llm, fake_model, monkeypatch):
    calls = []
    monkeypatch.setattr(starting, "enable_compile_cache", lambda **_: calls.append(1))
    make_llm()
    assert len(calls) == 1
    LLM(fake_model)
    assert len(calls) == 2


def test_auto_is_float32_on_a_cpu(fake_model):
    assert LLM(fake_model).engine_config.dtype == "float32"
    assert LLM(str(fake_model), dtype="bfloat16").engine_config.dtype == "bfloat16"


# --- the model's own sampling parameters ----------------------------------------------------------


@pytest.mark.parametrize("sample", [True, False])
def test_what_a_generation_config_says_of_sampling_is_taken(fake_model, sample):
    values = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    values |= {"repetition_penalty": 1.2, "max_new_tokens": 11, "pad_token_id": 3}
    (fake_model / "generation_config.json").write_text(json.dumps(values | {"do_sample": sample}))
    expected = SamplingParams(
        temperature=0.5 if sample else 0.0,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        max_tokens=11,
    )
    assert LLM(fake_model).get_default_sampling_params() == expected


def test_the_models_own_limit_gives_way_to_its_length(fake_model):
    (fake_model / "generation_config.json").write_text('{"max_new_tokens": 4000}')
    llm = LLM(fake_model)
    [output] = llm.generate("x" * 150)
    assert len(output.outputs[0].token_ids) == 50
    with pytest.raises(ValueError, match="prompt 0: 150 tokens and max_tokens=51 exceed"):
        llm.generate("x" * 150, SamplingParams(max_tokens=51))


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, SamplingParams(temperature=1.0)),
        ('{"temperature": 0.6, "top_k": 5, "top_p": 0.9, "do_sample": true}', (0.6, 5, 0.9)),
        ('{"do_sample": false, "temperature": 0.6}', (0.0, 0, 1.0)),
    ],
)
def test_default_params_come_from_the_model(fake_model, content, expected):
    if content is not None:
        (fake_model / "generation_config.json").write_text(content)
    params = LLM(fake_model).get_default_sampling_params()
    if content is None:
        assert params == expected
    else:
        assert (params.temperature, params.top_k, params.top_p) == expected


@pytest.mark.parametrize(
    "content, expected",
    [("{}", 1.0), ('{"temperature": 0.6}', 0.6), ('{"do_sample": false}', 0.0)],
)
def test_a_temperature_that_is_not_given_is_the_models_own(fake_model, content, expected):
    (fake_model / "generation_config.json").write_text(content)
    llm = LLM(fake_model)
    with llm.feed() as feed:
        feed.add(["ab", "cd"], SamplingParams(max_tokens=5))
        feed.add("ab", [SamplingParams(max_tokens=5, temperature=0.25)])
        feed.add("ab")
        feed.step()
    temperatures = [request.params.temperature for request in llm._engine.added]
    assert temperatures == [expected, expected, 0.25, expected]
    assert {request.params.max_tokens for request in llm._engine.added} == {5, None}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold an object, got list"),
        ('{"temperature": "hot"}', "temperature must be 0 or a number .*, got 'hot'"),
    ],
)
def test_a_bad_generation_config_is_named(fake_model, content, message):
    (fake_model / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"generation_config\.json.* {message}"):
        LLM(fake_model)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "platform, known, expected",
    [
        ("gpu", {"bytes_in_use": 3, "peak_bytes_in_use": 7}, 7),
        ("gpu", None, None),
        ("cpu", None, 11),
    ],
)
def test_the_peak_is_the_device_s_or_on_a_cpu_the_process_s(monkeypatch, platform, known, expected):
    device = SimpleNamespace(platform=platform, memory_stats=lambda: known)
    monkeypatch.setattr(this_device, "peak_resident_bytes", lambda: 11)
    assert this_device.peak_memory_bytes(device) == expected


@pytest.fixture
def small_machine(monkeypatch):
    monkeypatch.setattr(devices, "ram_bytes", lambda: 2**30)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"memory": "8GiB"},
            r"memory 8 GiB for 8 rows .* has 1 GiB; use at most memory=\"947MiB\"",
        ),
        (
            {"max_rows": 10**6},
            r"memory at least .* for 1,000,000 rows .* has 1 GiB; use at most max_rows=\d+",
        ),
        (
            {"max_rows": 10**6, "memory": "8TiB"},
            r"memory 8 TiB for 1,000,000 rows .* has 1 GiB; use at most max_rows=\d+ and at most memory=\"[\d.]+MiB\"",
        ),
    ],
)
def test_more_memory_than_the_machine_has_is_refused_at_once(
    small_machine, make_recurrent, given, message
):
    with pytest.raises(ValueError, match=f"LLM: this model does not fit: .* {message}") as error:
        make_recurrent(**given)
    advice = re.findall(r'(max_rows|memory)="?(\w[\w.]*)', str(error.value).rpartition("use ")[2])
    better = {name: int(value) if value.isdigit() else value for name, value in advice}
    assert make_recurrent(**given | better)._engine


def test_the_default_memory_fits_any_machine(small_machine, make_recurrent):
    assert make_recurrent()._engine


@pytest.fixture
def make_recurrent(make_llm):
    """An LLM over the fake engine, of a model whose rows have rings."""
    from hybrid_jax.config import Mamba2, ModelConfig, residual_layer

    mixer = Mamba2(num_heads=8, head_dim=64, state_size=64)
    config = ModelConfig(
        family="mamba2", vocab_size=256, width=256, layers=(residual_layer(mixers=(mixer,)),) * 4
    )
    return lambda **given: llm_module.LLM.from_params(config, None, **given)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
        MemoryError(),
    ],
)
def test_a_device_without_room_says_what_to_lower(make_llm, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(starting, "Engine", refuse)
    with pytest.raises(
        ValueError, match="no room for arena, rings and tables; lower memory or max_r"
    ):
        make_llm()


def test_other_errors_of_the_device_pass(make_llm, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(starting, "Engine", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        make_llm()


def test_weights_without_room_say_so(fake_model, monkeypatch):
    def refuse(**_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    found = SimpleNamespace(config=CONFIG, load=refuse)
    monkeypatch.setattr(starting, "open_with_drafter", lambda *_: found)
    with pytest.raises(
        ValueError, match="no room for the weights; use dtype='bfloat16' or a smaller"
    ):
        LLM(fake_model)


def test_a_tokenizer_that_cannot_be_read_is_known_before_there_is_an_engine(
    fake_model, monkeypatch
):
    monkeypatch.setattr(starting, "Engine", None)
    (fake_model / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer that can be read"):
        LLM(fake_model)


def test_a_copy_without_the_bundled_model_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(llm_module, "BUNDLED", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no bundled model at {tmp_path}; name one"):
        llm_module.LLM()
