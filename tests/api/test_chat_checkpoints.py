"""Conversations whose thoughts are cut, and marked messages, on a tiny model: what is hit, and the same tokens."""

from __future__ import annotations

import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.text.conversation import common_length
from tests.llms import tiny_llm
from tests.text.chat_forms import AREA, TEMPLATES, call, result, says

GRAIN = 32
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
ANSWER, MORE = says("assistant", "Hm.\n</think>\n\nSo be it."), says("user", "And now?")
CALLED = [says("assistant", None, tool_calls=[call()], reasoning="hm " * 40), result()]
BEGUN = says("assistant", "<think>\n" + "hm " * 30)
FINISHED = says("assistant", BEGUN["content"] + ANSWER["content"])

# The chat template, what comes after the user's first message, what that has become when the user goes on, and options.
TALKS = {
    "an opening": ("nemotron_h", [], [ANSWER, MORE], {}),
    "thoughts before a call": ("qwen3", CALLED, [*CALLED, ANSWER, MORE], {"tools": [AREA]}),
    "an open answer": ("qwen3", [BEGUN], [FINISHED, MORE], {"continue_final_message": True}),
}


@pytest.fixture(scope="module")
def llm():
    with tiny_llm() as llm:
        yield llm


def hit(llm, first, second, *, marked):
    """The outputs of two prompts, one after the other. Without its marks a prompt is its token ids."""
    llm.reset_prefix_cache()
    prompts = [p if marked else {"prompt_token_ids": p.token_ids} for p in (first, second)]
    return [output for prompt in prompts for output in llm.generate(prompt, PARAMS)]


@pytest.mark.parametrize("name", TALKS)
def test_the_next_turn_hits_up_to_the_cut(llm, name):
    template, follows, then, options = TALKS[name]
    reasons = []
    # The cut is far from a multiple of the grain, just before one, at one, and just after it.
    for length in (100, 125, 130, 131, 132):
        user = says("user", "a" * length)
        options = options | {"chat_template": TEMPLATES[template]}
        first = llm.render_chat([user, *follows], **options)
        more = {key: value for key, value in options.items() if key != "continue_final_message"}
        second = llm.render_chat([user, *then], **more)
        same = common_length(first.text, second.text)
        outputs, plain = (hit(llm, first, second, marked=marked) for marked in (True, False))
        assert outputs[1].num_cached_tokens == same // GRAIN * GRAIN > 0
        said = f"knew only the first {same} tokens of this prompt, so it could resume at {same // GRAIN * GRAIN}"
        assert llm.cache.explain(outputs[1]).reason.endswith(said)
        tokens, others = ([out.outputs[0].token_ids for out in each] for each in (outputs, plain))
        assert tokens == others
        if plain[1].num_cached_tokens < outputs[1].num_cached_tokens:
            reasons.append(llm.cache.explain(plain[1]).reason)
    assert reasons and all("but had no saved state up to" in said for said in reasons)


def rounds(llm, *, marked):
    """Three turns of four conversations, in turns; returns the tokens, and how many of each prompt were cached."""
    talks = [[says("user", letter * 126)] for letter in "abcd"]
    found = []
    for _ in range(3):
        for talk in talks:
            prompt = llm.render_chat(talk, chat_template=TEMPLATES["nemotron_h"])
            given = prompt if marked else {"prompt_token_ids": prompt.token_ids}
            [output] = llm.generate(given, PARAMS)
            found.append((output.outputs[0].token_ids, output.num_cached_tokens))
            talk += [ANSWER, says("user", "q" * 36)]
    return [tokens for tokens, _ in found], [cached for _, cached in found]


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_the_cut_stays_in_an_arena_that_evicts(policy):
    small = {"max_rows": 1, "max_model_len": 512, "memory": "600KB", "cache": policy}
    with tiny_llm(**small) as llm:
        tokens, cached = rounds(llm, marked=True)
        stats = llm.stats()
        assert stats["cache_leaf_evictions"] + stats["cache_tombstone_evictions"] >= 10
        llm.reset_prefix_cache()
        others, plain = rounds(llm, marked=False)
    assert tokens == others
    # At first the cache finds out that all of them begin alike.
    assert cached == [0, 0, 32, 32, *[160] * 4, *[256] * 4]
    assert plain == [0, 0, 32, 32, *[32] * 4, *[160] * 4]


def test_a_marked_message_is_hit_by_whoever_goes_on_differently(llm):
    asked, found = {"chat_template": TEMPLATES["qwen3_5"]}, []
    for mark in (True, False):
        document = says("user", "a" * 120, cache=mark)
        talks = [[document, says("assistant", answer), MORE] for answer in ("Yes.", "No.")]
        end = common_length(*(llm.render_chat(talk, **asked).text for talk in talks))
        llm.reset_prefix_cache()
        found += [llm.chat(talk, PARAMS, **asked)[0].num_cached_tokens for talk in talks]
    assert found == [0, end // GRAIN * GRAIN, 0, 0] and end > 120
