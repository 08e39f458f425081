"""`LLM` over a scripted engine: prompts in, outputs out, and nothing left behind."""

from __future__ import annotations

import pytest

from hybrid_jax import LLM, CacheConfig, SamplingParams, completions, intake
from hybrid_jax import llm as llm_module
from hybrid_jax.completions import derive_seed
from hybrid_jax.options import peak_memory_bytes
from hybrid_jax.text import IncrementalDecoder
from tests.surface.fake_engine import EOS

SCRIPT = "The quick brown fox jumps over the lazy dog. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


# --- prompts and outputs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, count",
    [
        ("ab", 1),
        (["ab", "c"], 2),
        ({"prompt": "ab"}, 1),
        ({"prompt_token_ids": [97, 98]}, 1),
        (["ab", {"prompt_token_ids": (97,)}, {"prompt": "c"}], 3),
        ([], 0),
    ],
)
def test_every_way_to_write_prompts(llm, prompts, count):
    outputs = llm.generate(prompts, GREEDY)
    assert texts(outputs) == [SCRIPT[:12]] * count


def test_an_output_says_what_happened(llm):
    [output] = llm.generate("ab", GREEDY)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("ab", (97, 98), True)
    [completion] = output.outputs
    assert completion.token_ids == tuple(SCRIPT[:12].encode())
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    metrics = output.metrics
    assert 0 < metrics.ttft_s <= metrics.total_s
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (2, 12)
    assert metrics.decode_tokens_per_s > 0


def test_outputs_keep_the_order_of_prompts_that_end_at_different_times(make_llm):
    llm = make_llm(max_rows=2)
    params = [SamplingParams(max_tokens=n) for n in (30, 1, 17, 4)]
    outputs = llm.generate(["a", "b", "c", "d"], params)
    assert [o.prompt for o in outputs] == ["a", "b", "c", "d"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [30, 1, 17, 4]
    assert len({o.request_id for o in outputs}) == 4


def test_without_max_tokens_a_completion_fills_the_model(llm):
    [output] = llm.generate("abcd")
    assert len(output.outputs[0].token_ids) == 200 - 4
    assert output.outputs[0].finish_reason == "length"


def test_n_completions_share_a_seed_and_differ_by_index(llm):
    [output] = llm.generate("ab", SamplingParams(n=3, max_tokens=4, seed=9))
    assert [c.text for c in output.outputs] == ["The ", "quic", "k br"]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    requests = llm._engine.added
    assert [(r.seed, r.sample_index) for r in requests] == [(9, 0), (9, 1), (9, 2)]
    assert len({r.request_id for r in requests}) == 3
    assert output.metrics.num_generation_tokens == 12


def test_seeds_come_from_the_request_number(make_llm):
    llm = make_llm(seed=5)
    llm.generate(["a", "b"], GREEDY)
    llm.generate("c", GREEDY)
    assert [r.seed for r in llm._engine.added] == [derive_seed(5, k) for k in range(3)]
    assert len({derive_seed(s, k) for s in range(20) for k in range(20)}) == 400


def test_logprobs_are_dicts_by_token(llm):
    [output] = llm.generate("ab", SamplingParams(max_tokens=2, logprobs=2))
    [first, _] = output.outputs[0].logprobs
    assert [(t, p.rank, p.decoded_token) for t, p in first.items()] == [(84, 1, "T"), (85, 2, "U")]
    assert output.outputs[0].cumulative_logprob == -0.5
    [none] = llm.generate("ab", GREEDY)
    assert none.outputs[0].logprobs is None
    assert none.outputs[0].cumulative_logprob is None


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("include, text", [(False, "The quick "), (True, "The quick brown")])
def test_a_stop_string_ends_text_and_tokens_whatever_the_step_size(make_llm, steps, include, text):
    llm = make_llm(steps_per_dispatch=steps)
    params = SamplingParams(
        stop=["fox", "brown"], include_stop_str_in_output=include, logprobs=1, max_tokens=40
    )
    [output] = llm.generate("ab", params)
    [completion] = output.outputs
    assert completion.text == text
    assert completion.token_ids == tuple(b"The quick brown")
    assert len(completion.logprobs) == 15
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "brown")
    assert llm._engine.aborted == [output.request_id]
    assert not llm._engine.has_work


def test_a_stop_string_on_the_last_token_is_a_stop(make_llm):
    llm = make_llm()
    [output] = llm.generate("ab", SamplingParams(stop="quick", max_tokens=9))
    assert output.outputs[0].finish_reason == "stop"
    assert llm._engine.aborted == []


@pytest.mark.parametrize(("least", "length"), [(0, 4), (4, 4), (5, 49), (9, 49)])
def test_stop_strings_that_begin_within_the_least_length_pass(llm, least, length):
    params = SamplingParams(stop="quick", max_tokens=60, min_tokens=least)
    [output] = llm.generate("ab", params)
    assert output.outputs[0].text == (llm._engine.script.decode() * 2)[:length]
    assert output.outputs[0].stop_reason == "quick"


def test_a_held_back_start_of_a_stop_string_is_given_out_at_the_end(llm):
    [output] = llm.generate("ab", SamplingParams(stop="quicker", max_tokens=9))
    assert output.outputs[0].text == "The quick"
    assert output.outputs[0].finish_reason == "length"


def test_stop_tokens_stay_in_the_tokens_and_leave_the_text(llm):
    [output] = llm.generate("ab", SamplingParams(stop_token_ids=[ord("q")], max_tokens=40))
    [completion] = output.outputs
    assert (completion.text, completion.token_ids[-1]) == ("The ", ord("q"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("q"))


@pytest.mark.parametrize("ignore, length", [(False, 3), (True, 6)])
def test_the_models_own_end_token(llm, monkeypatch, ignore, length):
    monkeypatch.setattr(type(llm._engine), "script", b"ab\x00cd")
    [output] = llm.generate("x", SamplingParams(max_tokens=6, ignore_eos=ignore))
    [completion] = output.outputs
    assert len(completion.token_ids) == length
    assert completion.stop_reason is None
    if not ignore:
        assert (completion.text, completion.token_ids[-1]) == ("ab", EOS)


def test_text_can_be_switched_off(llm):
    [output] = llm.generate("ab", SamplingParams(max_tokens=3, detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 3


# --- streaming ------------------------------------------------------------------------------------


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
    deltas = llm.stream("ab", SamplingParams(max_tokens=100))
    next(deltas)
    assert llm._engine.has_work
    deltas.close()
    assert not llm._engine.has_work
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


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "prompt 1: is empty"),
        ({"prompt_token_ids": []}, "prompt 1: is empty"),
        ({"prompt_token_ids": [1, 256]}, "prompt 1: token ids must lie between 0 and 255, got 256"),
        ({"prompt_token_ids": [-1]}, "prompt 1: token ids must .* got -1"),
        ({"prompt_token_ids": ["a"]}, r"prompt 1: prompt_token_ids must be integers, got \['a'\]"),
        ({"prompt_token_ids": 7}, "prompt 1: prompt_token_ids must be integers, got 7"),
        ({"text": "a"}, r"prompt 1: a prompt as a dict .*, got \['text'\]"),
        (7, "prompt 1: must be text or .*, got int"),
        ("x" * 200, "prompt 1: has 200 tokens and needs room for one more.* is 200"),
        ("x" * 195, "prompt 1: 195 tokens and max_tokens=12 exceed .* 200; lower max_tokens to 5"),
        ({"prompt_token_ids": [255]}, "prompt 1: the engine refuses byte 255"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", prompt, "fine"], GREEDY)
    assert llm._engine.num_steps == 0
    assert not llm._engine.has_work
    assert texts(llm.generate("fine", GREEDY)) == [SCRIPT[:12]]


@pytest.mark.parametrize(
    "params, message",
    [
        ([GREEDY], "sampling_params: 2 prompts need as many, got 1"),
        ([GREEDY, {"n": 1}], r"sampling_params\[1\] must be SamplingParams, got dict"),
        ({"n": 1}, "sampling_params must be SamplingParams or a list of them, got dict"),
        (
            [GREEDY, SamplingParams(stop_token_ids=[3, 256])],
            "prompt 1: stop_token_ids must lie below the vocabulary's 256, got 256",
        ),
        (
            SamplingParams(min_tokens=10**12),
            "prompt 0: 1 tokens and min_tokens=1000000000000 exceed the longest sequence of 200; "
            "lower min_tokens to 199 at most",
        ),
        (
            SamplingParams(stop_token_ids=[2**31]),
            "prompt 0: stop_token_ids must lie below the vocabulary's 256, got 2147483648",
        ),
        (SamplingParams(stop_token_ids=range(16)), "at most 16 stop token ids .*, got 17"),
    ],
)
def test_bad_params_are_named(llm, params, message):
    if "17" in message:
        params = SamplingParams(stop_token_ids=range(1, 17))
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], params)


def test_without_a_tokenizer_only_text_is_refused(make_llm):
    llm = make_llm(tokenizer=None)
    assert llm.get_tokenizer() is None
    [output] = llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="prompt 0: is text, but this model came without"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"))
    with pytest.raises(ValueError, match=r"chat: .* without a tokenizer\.json, .*; put one beside"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
def test_after_an_interruption_the_next_call_is_right(llm, error):
    llm._engine.raises = error
    with pytest.raises(type(error)):
        llm.generate(["ab", "cd"], SamplingParams(max_tokens=100))
    assert not llm._engine.has_work
    assert llm._calls.num_unfinished == 0
    assert texts(llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


PLACES = ["step", "add", *(("push", k) for k in (1, 2, 5, 9, 14)), *(("delta", k) for k in (1, 4))]


def interrupt(monkeypatch, engine, place):
    """Makes Ctrl-C fall, once, after an engine call's work or before the k-th call of something else."""
    if isinstance(place, str):
        target, name, when = engine, place, 1
    elif place[0] == "push":
        target, name, when = IncrementalDecoder, "push", place[1]
    else:
        target, name, when = completions, "Delta", place[1]
    real, calls = getattr(target, name), []

    def call(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(target, name, call)
    return calls


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_an_interrupted_call_takes_nothing_from_a_stream_around_it(
    make_llm, monkeypatch, place, steps
):
    params = SamplingParams(max_tokens=23, logprobs=1, stop="lazy")
    expected = list(make_llm(steps_per_dispatch=steps).stream("ab", params))[-1].output.outputs
    llm = make_llm(steps_per_dispatch=steps)
    deltas = llm.stream("ab", params)
    found = [next(deltas)]
    with monkeypatch.context() as patch:
        calls = interrupt(patch, llm._engine, place)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                llm.generate(["cd", "ef"], SamplingParams(max_tokens=11))
        assert calls
    assert len(llm._engine.requests) <= 1
    found += deltas
    assert "".join(d.text for d in found) == expected[0].text
    assert sum((d.token_ids for d in found), ()) == expected[0].token_ids
    assert sum((d.logprobs for d in found), ()) == expected[0].logprobs
    assert [d.finished() for d in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].output.outputs == expected
    assert not llm._engine.has_work
    assert llm._calls.num_unfinished == 0
    assert texts(llm.generate(["ab", "cd"], GREEDY)) == [SCRIPT[:12]] * 2


def test_an_interrupt_while_a_stop_string_ends_a_completion_ends_it_once(make_llm, monkeypatch):
    llm = make_llm(steps_per_dispatch=3)
    deltas = llm.stream("ab", SamplingParams(max_tokens=100, stop="brown"))
    found = [next(deltas)]
    real, calls = llm._engine.abort, []

    def abort(request_id):
        calls.append(request_id)
        if len(calls) == 1:
            raise KeyboardInterrupt  # before it does anything
        real(request_id)

    monkeypatch.setattr(llm._engine, "abort", abort)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("cd", SamplingParams(max_tokens=60))
    assert calls[0] == found[0].request_id
    llm.generate("ef", SamplingParams(max_tokens=9))
    assert not llm._engine.has_work
    found += deltas
    assert "".join(d.text for d in found) == "The quick "
    assert [d.finished() for d in found] == [False] * (len(found) - 1) + [True]


def test_progress_is_told_only_when_a_prompt_is_done(make_llm):
    llm, seen = make_llm(steps_per_dispatch=1), []
    params = [SamplingParams(max_tokens=n) for n in (3, 9, 9)]
    llm.generate(["a", "b", "c"], params, progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 3), (3, 3)]


def test_a_character_cut_by_the_end_of_the_prompt_is_whole_in_the_text(llm, monkeypatch):
    monkeypatch.setattr(type(llm._engine), "script", b"\xa9!")
    [output] = llm.generate({"prompt_token_ids": [97, 0xC3]}, SamplingParams(max_tokens=2))
    assert output.outputs[0].text == "\u00e9!"


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"speculation": "ngram"}, NotImplementedError, "speculation='ngram' is not built yet"),
        ({"quantize": "int8"}, NotImplementedError, "quantize='int8'"),
        ({"mesh": "tp=2"}, NotImplementedError, "mesh='tp=2'"),
        ({"host_memory": "2GiB"}, NotImplementedError, "host_memory='2GiB'"),
        ({"cache_dir": "x"}, NotImplementedError, "cache_dir='x'"),
        ({"cache": "marconi"}, NotImplementedError, "cache='marconi'"),
        ({"cache": "adaptive"}, NotImplementedError, "cache='adaptive'"),
        ({"cache": "best"}, ValueError, "cache must be 'lru', 'off' or a CacheConfig, got 'best'"),
        ({"max_num_seqs": 4}, TypeError, "'max_num_seqs'; did you mean max_rows"),
        ({"colour": 4}, TypeError, "unknown option 'colour'; it has cache, exact, grain"),
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


def test_options_reach_the_engine(make_llm):
    llm = make_llm(
        memory="1GiB", max_rows=3, cache="off", grain=16, exact=True, speculation="off", mesh=None
    )
    config = llm.engine_config
    assert (config.memory, config.max_rows, config.grain) == (2**30, 3, 16)
    assert config.cache == CacheConfig(policy="off")
    assert config.exact
    assert make_llm(cache=CacheConfig()).engine_config.cache.policy == "lru"


def test_weights_in_memory_use_the_compile_cache_too(make_llm, fake_model, monkeypatch):
    calls = []
    monkeypatch.setattr(llm_module, "enable_compile_cache", lambda: calls.append(1))
    make_llm()
    assert len(calls) == 1
    LLM(fake_model)
    assert len(calls) == 2


def test_auto_is_float32_on_a_cpu(fake_model):
    assert LLM(fake_model).engine_config.dtype == "float32"
    assert LLM(str(fake_model), dtype="bfloat16").engine_config.dtype == "bfloat16"


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, SamplingParams()),
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


# --- the rest of the surface ----------------------------------------------------------------------


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    [output] = llm.chat(messages, GREEDY, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "<user>hi<assistant>yo!"
    assert texts([output]) == [SCRIPT[:12]]
    assert len(llm.chat([messages, messages[:1]], GREEDY)) == 2
    with pytest.raises(ValueError, match="chat: messages must be a non-empty list"):
        llm.chat([])


def test_the_cache_explains_itself(make_llm):
    llm = make_llm(grain=16)
    prompt = "x" * 50
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    short = llm.generate("x", GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    explain = llm.cache.explain
    assert "no earlier sequence left pages" in str(explain(first.request_id))
    assert explain(second.request_id).hit_tokens == explain(second.request_id).possible_tokens == 48
    assert "48 of 50 prompt tokens" in str(explain(second.request_id))
    assert "holds no resume point" in explain(short.request_id).reason
    aligned = llm.generate("y" * 48, GREEDY)[0]
    assert explain(aligned.request_id).possible_tokens == 32  # the last token must be computed
    assert llm.cache.describe() == "a fake engine\n[0, 4) 97 98: known"
    with pytest.raises(KeyError, match="no finished request '99'"):
        explain("99")
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    off = make_llm(cache="off")
    assert off.cache.describe() == "a fake engine\nthe cache is off"
    assert "the cache is off" in str(off.cache.explain(off.generate("a", GREEDY)[0].request_id))


def test_describe_says_where_the_memory_goes(make_llm):
    llm = make_llm(max_rows=3)
    llm._weight_bytes = 5 << 20
    assert llm.describe().splitlines() == [
        "model     llama, 1 layers of width 8",
        "weights   5 MiB float32",
        "arena     3 MiB in 7 frames",
        "rings     2 KiB for 3 rows",
        "tables    64 B for 5 checkpoints",
        "logits    4 KiB during a step, 512 B for penalties and biases",
        "sequences up to 200 tokens, 3 at a time",
        "cache     lru; prompts resume at multiples of 32 tokens, 64 B of KV a token",
    ]


def test_a_new_object_prints_what_it_is_and_nothing_else(make_llm, capfd):
    llm = make_llm(max_rows=3)
    assert capfd.readouterr() == ("", llm.describe() + "\n")
    llm.generate("ab", GREEDY)
    make_llm(quiet=True)
    assert capfd.readouterr() == ("", "")


def test_stats_count_what_was_done(llm):
    llm.generate(["ab", "cde"], GREEDY)
    assert llm.stats() == {
        "requests": 2,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "generated_tokens": 24,
        "engine_steps": 2,
        "peak_memory_bytes": pytest.approx(peak_memory_bytes(), rel=0.1),
    }


def test_an_output_has_the_peak_at_its_end_which_is_read_once(llm, monkeypatch):
    reads = iter(range(100, 200))
    monkeypatch.setattr(intake, "peak_memory_bytes", lambda: next(reads))
    lengths = [SamplingParams(max_tokens=n, n=2) for n in (30, 3, 17)]
    outputs = llm.generate(["a", "b", "c"], lengths)
    assert [output.metrics.peak_memory_bytes for output in outputs] == [102, 100, 101]
    with llm.feed() as feed:
        ticket = feed.add("a", GREEDY)
        feed.step()
        [unfinished] = ticket.outputs()
    assert unfinished.outputs[0].token_ids
    assert unfinished.metrics.peak_memory_bytes is None
    assert next(reads) == 103


def test_progress_is_reported(llm, capsys):
    seen = []
    llm.generate(["a", "b"], GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    steps = []
    llm.warmup(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    llm.generate("a", GREEDY, use_tqdm=True)
    assert capsys.readouterr().out == ""


def test_a_closed_llm_says_so(make_llm):
    with make_llm() as llm:
        assert "max_model_len=200" in repr(llm)
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate("a", GREEDY)
    assert "closed" in repr(llm)
    llm.close()
