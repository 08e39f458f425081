"""`LLM` over a scripted engine: prompts in, outputs out, and mistakes named before anything runs."""

from __future__ import annotations

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api.completions import derive_seed
from tests.api.fake_engine import GREEDY, SCRIPT, texts


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


def test_text_can_be_switched_off(llm):
    [output] = llm.generate("ab", SamplingParams(max_tokens=3, detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 3


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
        (
            [GREEDY],
            "sampling_params: 2 prompts and 1 SamplingParams; give one, or one for each prompt",
        ),
        ([GREEDY, {"n": 1}], r"sampling_params\[1\] must be SamplingParams, got {'n': 1}"),
        ({"n": 1}, "sampling_params must be SamplingParams or a list of them, got {'n': 1}"),
        ("greedy", "sampling_params must be SamplingParams or a list of them, got 'greedy'"),
        (
            [GREEDY, SamplingParams(stop_token_ids=[3, 256])],
            "prompt 1: stop_token_ids must name token ids below the vocabulary's 256, got 256",
        ),
        (
            SamplingParams(min_tokens=10**12),
            "prompt 0: 1 tokens and min_tokens=1000000000000 exceed the longest sequence of 200; "
            "lower min_tokens to 199 at most",
        ),
        (
            SamplingParams(stop_token_ids=[2**31]),
            "prompt 0: stop_token_ids must name token ids below the vocabulary's 256, got 2147483648",
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


def test_a_character_cut_by_the_end_of_the_prompt_is_whole_in_the_text(llm, monkeypatch):
    monkeypatch.setattr(type(llm._engine), "script", b"\xa9!")
    [output] = llm.generate({"prompt_token_ids": [97, 0xC3]}, SamplingParams(max_tokens=2))
    assert output.outputs[0].text == "\u00e9!"


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    [output] = llm.chat(messages, GREEDY, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "<user>hi<assistant>yo!"
    assert texts([output]) == [SCRIPT[:12]]
    assert len(llm.chat([messages, messages[:1]], GREEDY)) == 2
    with pytest.raises(ValueError, match="chat: messages must be a non-empty list"):
        llm.chat([])


def test_a_closed_llm_says_so(make_llm):
    with make_llm() as llm:
        assert "max_model_len=200" in repr(llm)
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate("a", GREEDY)
    assert "closed" in repr(llm)
    llm.close()


def test_prompts_are_added_in_the_engines_order_and_answered_in_theirs(llm, monkeypatch):
    monkeypatch.setattr(llm._engine, "order", lambda prompts: [2, 0, 1])
    outputs = llm.generate(["a", "b", "c"], GREEDY)
    assert [bytes(request.prompt) for request in llm._engine.added] == [b"c", b"a", b"b"]
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
