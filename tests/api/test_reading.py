"""`LLM.score` and `LLM.embed`."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.models.decoder import forward
from tests.llms import HEAD


def by_prompt_logprobs(llm, prompt, continuation):
    """The same by a request for all log-probabilities of the prompt."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate(prompt + continuation, params)
    last = output.prompt_logprobs[len(prompt) :]
    tokens = output.prompt_token_ids[len(prompt) :]
    return [p[token].logprob for p, token in zip(last, tokens, strict=True)]


def test_scores_are_those_of_the_prompts_own_logprobs(bundled):
    endings = ["    return 1\n", "    def read(self):\n", "zq"]
    scores = bundled.score(HEAD, endings)
    for score, ending in zip(scores, endings, strict=True):
        want = by_prompt_logprobs(bundled, HEAD, ending)
        assert score.token_ids == tuple(ending.encode())
        assert np.allclose(score.token_logprobs, want, atol=3e-4)
        assert np.isclose(score.logprob, sum(want), atol=2e-3)


def test_what_greedy_decoding_writes_is_greedy(bundled):
    [output] = bundled.generate(HEAD, SamplingParams(max_tokens=12, temperature=0.0))
    [own, other] = bundled.score(HEAD, [output.outputs[0].text, "zq"])
    assert own.is_greedy and own.ranks == (1,) * 12
    assert not other.is_greedy and max(other.ranks) > 1


def test_a_shared_prompt_is_computed_once(bundled):
    prompt = "class Once:\n" + "    value = 1\n" * 10
    before = bundled.stats()
    bundled.score(prompt, [f"    other = {k}\n" for k in range(6)])
    after = bundled.stats()
    computed = after["prefill_tokens"] - before["prefill_tokens"]
    assert computed < 128 + 6 * 44  # the shared blocks once, and the rest of each
    assert after["cache_hits"] - before["cache_hits"] == 5


def test_prompts_and_continuations_pair(bundled):
    ids = [{"prompt_token_ids": [97, 98]}, {"prompt_token_ids": [97, 98]}]
    texts = bundled.score(["ab", "ab"], ["cd", "ef"])
    mixed = bundled.score(ids, ["cd", {"prompt_token_ids": [101, 102]}])
    assert [s.token_ids for s in texts] == [s.token_ids for s in mixed] == [(99, 100), (101, 102)]
    assert np.allclose([s.logprob for s in texts], [s.logprob for s in mixed], atol=1e-4)
    [both] = bundled.score([97, 98], [99, 100])
    assert both.token_ids == (99, 100)
    several = bundled.score(["x = ", "import "], "os")
    assert len(several) == 2 and several[1].logprob > several[0].logprob
    assert bundled.score([], []) == []


def test_a_token_that_reaches_into_the_continuation_belongs_to_it(make_llm):
    class Pairs:
        """Two characters a token."""

        def encode(self, text):
            return [200 + ord(text[i]) % 7 for i in range(0, len(text), 2)]

        def decode(self, ids):
            return self.text[: 2 * len(ids)]

    tokenizer = Pairs()
    tokenizer.text = "abcde"
    llm = make_llm(tokenizer=tokenizer)
    llm.score("abc", "de")
    assert (llm._engine.added[-1].logprobs_from, len(llm._engine.added[-1].prompt)) == (1, 3)
    tokenizer.text = "ab"
    with pytest.raises(ValueError, match="shares its first token with all of its prompt 'a'"):
        llm.score("a", "b")


def test_an_empty_prompt_is_the_token_that_begins_texts(bundled):
    begin = bundled.get_tokenizer().bos_token_id
    [empty], [given] = bundled.score("", "import os"), bundled.score([begin], "import os")
    assert empty == given and len(empty.token_ids) == 9


class WithBeginAndEnd:
    """Writes a token before a text and one after it, and drops spaces at the end."""

    bos_token_id = 1

    def encode(self, text, add_special_tokens=True):
        ids = list(text.rstrip(" ").lower().encode())
        return [1, *ids, 2] if add_special_tokens else ids

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i > 2 or not skip_special_tokens).decode()


@pytest.mark.parametrize(
    "prompt, continuation, ids, first",
    [
        ("ab", "cd", [1, 97, 98, 99, 100], 3),
        ("ab", {"prompt": "cd"}, [1, 97, 98, 99, 100], 3),
        ([97, 98], "cd", [97, 98, 99, 100], 2),
        ([97, 98], {"prompt": "cd"}, [97, 98, 99, 100], 2),
        ("", "cd", [1, 99, 100], 1),
    ],
)
def test_special_tokens_stand_only_before_the_prompt(make_llm, prompt, continuation, ids, first):
    llm = make_llm(tokenizer=WithBeginAndEnd())
    llm.score(prompt, continuation)
    added = llm._engine.added[-1]
    assert (list(added.prompt), added.logprobs_from) == (ids, first)


def test_what_a_template_wrote_gets_no_special_tokens_again(make_llm):
    llm = make_llm(tokenizer=WithBeginAndEnd())
    template = "\x01{% for m in messages %}{{ m.content }}{% endfor %}"
    llm.score(llm.render_chat([{"role": "user", "content": "ab"}], chat_template=template), "cd")
    added = llm._engine.added[-1]
    assert (list(added.prompt), added.logprobs_from) == ([1, 97, 98, 99, 100], 3)


@pytest.mark.parametrize(
    "prompt, continuation, said",
    [
        ("Ab", "c", "where it begins is not known"),
        ([97], " ", "continuation 0 adds no token to its prompt"),
    ],
)
def test_a_continuation_that_cannot_be_found_is_refused(make_llm, prompt, continuation, said):
    with pytest.raises(ValueError, match=said):
        make_llm(tokenizer=WithBeginAndEnd()).score(prompt, continuation)


@pytest.mark.parametrize(
    "prompts, continuations, said",
    [
        (["a", "b"], ["c", "d", "e"], "2 prompts and 3 continuations do not pair"),
        ("a", "", "continuation 0 is empty; there is nothing to score"),
        ("a", ["b", []], "is empty"),
        ([[]], "b", "prompt 0: is empty"),
        (3, "b", "score: prompts must be text, token ids, or a list of these, got 3"),
        ("a", b"b", "score: continuations must be text, token ids, or a list of these, got b'b'"),
        ("a", [5000], "token ids must lie between 0 and"),
        ("a", ["b", 5], "score: continuation 1 must be text or token ids, got int 5"),
    ],
)
def test_wrong_pairs_are_refused(bundled, prompts, continuations, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        bundled.score(prompts, continuations)


def test_vectors_have_length_one_and_do_not_depend_on_the_cache(bundled):
    texts = [HEAD + "x = 1", HEAD + "y = 2", "import os"]
    bundled.reset_prefix_cache()
    cold = bundled.embed(texts)
    warm = bundled.embed(texts)
    assert cold.dtype == np.float32 and cold.shape == (3, bundled.model_config.width)
    assert np.allclose(np.linalg.norm(cold, axis=1), 1)
    assert np.allclose(cold, warm, atol=1e-5)
    assert cold[0] @ cold[1] > cold[0] @ cold[2]


def test_a_mean_is_of_all_tokens(bundled):
    raw = bundled.embed([HEAD, HEAD], pooling="mean", normalize=False)
    prefixes = bundled.embed([HEAD[:n] for n in range(1, len(HEAD) + 1)], normalize=False)
    assert np.allclose(raw[0], prefixes.mean(axis=0), atol=1e-3)
    assert np.array_equal(raw[0], raw[1])
    assert bundled.embed([]).shape == (0, bundled.model_config.width)


def test_another_pooling_is_refused(bundled):
    with pytest.raises(ValueError, match="pooling must be 'last', 'mean' or 'none', got 'max'"):
        bundled.embed("a", pooling="max")


def test_the_vectors_of_all_tokens_are_those_of_the_prompts_that_end_there(bundled):
    bundled.reset_prefix_cache()
    vectors = bundled.embed([HEAD, "import os"], pooling="none", normalize=False)
    assert [array.shape for array in vectors] == [(len(HEAD), 192), (9, 192)]
    assert all(array.dtype == np.float32 for array in vectors)
    prefixes = bundled.embed([HEAD[:n] for n in range(1, len(HEAD) + 1)], normalize=False)
    assert np.allclose(vectors[0], prefixes, atol=1e-3)
    [mean] = bundled.embed(HEAD, pooling="mean", normalize=False)
    assert np.allclose(vectors[0].mean(axis=0), mean, atol=1e-5)
    [unit] = bundled.embed(HEAD, pooling="none")
    assert np.allclose(np.linalg.norm(unit, axis=1), 1)


def test_log_probabilities_of_all_tokens_are_those_of_a_forward_pass(bundled):
    """Prompts of more and of fewer tokens than one prefill takes, cold and from the cache."""
    texts = [HEAD, "import os\n" * 45, "x"]
    bundled.reset_prefix_cache()
    cold, warm = (bundled.logprobs(texts, positions="all") for _ in range(2))
    last = bundled.logprobs(texts)
    for text, every, again, after in zip(texts, cold, warm, last, strict=True):
        ids = np.asarray(bundled.encode(text))
        logits = forward(bundled._params, ids[None], bundled.model_config)[0]
        want = np.asarray(jax.nn.log_softmax(logits))
        assert every.dtype == np.float32 and every.shape == want.shape
        assert np.allclose(every, want, atol=1e-3) and np.allclose(again, want, atol=1e-3)
        assert after.shape == want.shape[1:] and np.allclose(after, want[-1], atol=1e-3)


def test_log_probabilities_of_all_tokens_hold_those_of_scores_and_of_drawn_tokens(bundled):
    [every] = bundled.logprobs(HEAD + "    return 1", positions="all")
    [score] = bundled.score(HEAD, "    return 1")
    own = [every[len(HEAD) - 1 + n, token] for n, token in enumerate(score.token_ids)]
    assert np.allclose(own, score.token_logprobs, atol=1e-4)
    [after] = bundled.logprobs(HEAD)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    [output] = bundled.generate(HEAD, params)
    [best] = output.outputs[0].logprobs
    assert list(best) == list(np.argsort(-after, kind="stable")[:20])
    assert np.allclose([found.logprob for found in best.values()], after[list(best)], atol=1e-4)


def test_what_comes_after_a_prompt_may_use_the_cache(bundled):
    prompt = "class Known:\n" + "    value = 1\n" * 12
    bundled.logprobs(prompt)
    before = bundled.stats()
    bundled.logprobs([prompt + "    x", prompt + "    y"])
    after = bundled.stats()
    assert after["cache_hits"] - before["cache_hits"] == 2
    bundled.logprobs(prompt + "    z", positions="all")
    assert bundled.stats()["cache_hits"] == after["cache_hits"]


def test_a_bad_prompt_of_several_keeps_its_place(bundled):
    [good, bad] = bundled.logprobs(["import os", ""], errors="return")
    assert good.shape == (bundled.model_config.vocab_size,)
    assert isinstance(bad, ValueError) and "prompt 1: is empty" in str(bad)
    assert bundled.logprobs([]) == []
    with pytest.raises(
        ValueError, match="logprobs: positions must be 'last' or 'all', got 'first'"
    ):
        bundled.logprobs("a", positions="first")


@pytest.mark.parametrize("own", [False, True])
def test_what_no_setting_can_change_is_not_advised(make_llm, own):
    """The model itself may take no more."""
    llm = make_llm()
    longest = llm.max_model_len
    llm._intake._config = replace(llm.model_config, max_position=longest if own else 2 * longest)
    for call in (
        lambda: llm.generate([[65] * longest]),
        lambda: llm.embed([[65] * (longest + 1)]),
        lambda: llm.score([65] * longest, [65]),
        lambda: llm.generate("a" * 20 * longest),
        lambda: llm.chat(
            [{"role": "user", "content": "a" * 20 * longest}],
            chat_template="{{ messages[0].content }}",
        ),
    ):
        with pytest.raises(ValueError, match="; shorten it") as refused:
            call()
        assert str(refused.value).endswith("; shorten it") == own
