"""What a notebook shows: outputs, the tree, explanations and stats, as HTML and in words."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from hybrid_jax import SamplingParams, inspect_model
from hybrid_jax.api.stats import MEANINGS, Stats
from tests.llms import HEAD

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Whole(HTMLParser):
    """Collects text, and checks that every element is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(html):
    parser = Whole()
    parser.feed(html)
    assert parser.open == []
    return "".join(parser.text)


def test_an_output_shows_prompt_text_and_numbers(bundled):
    [output] = bundled.generate("x = '<b>&'\n", GREEDY)
    shown = text_of(output._repr_html_())
    assert shown.startswith("x = '<b>&'\n" + output.outputs[0].text)
    assert "<b>" not in output._repr_html_()
    assert shown.endswith(output.metrics.in_words())


def test_a_long_prompt_shows_its_end(bundled):
    [output] = bundled.generate("#" * 300 + "y" * 150 + "end", GREEDY)
    shown = text_of(output._repr_html_())
    assert shown.startswith("... ###") and "yend" in shown and len(shown) < 600


def test_the_tree_shows_the_text_of_spans(bundled):
    bundled.reset_prefix_cache()
    assert bundled.cache.tree() == "(empty)"
    assert "empty" in bundled.cache.tree()._repr_html_()
    bundled.generate([HEAD + "a = 1", HEAD + "b = 2"], GREEDY)
    tree = bundled.cache.tree()
    assert repr(tree) == str(tree)
    first = tree.splitlines()[0]
    assert re.match(r'\[0, \d+\) "import os\\nimport sys', first) and first.count('"') == 2
    assert "import os\\nimport sys" in text_of(tree._repr_html_())
    assert "checkpoint" in tree


def test_an_explanation_is_a_bar_and_its_sentence(bundled):
    bundled.reset_prefix_cache()
    bundled.generate(HEAD, GREEDY)
    [output] = bundled.generate(HEAD + "more", GREEDY)
    explanation = bundled.cache.explain(output)
    html = explanation._repr_html_()
    assert text_of(html) == str(explanation)
    assert f"{explanation.hit_tokens} tokens came from the prefix cache" in html
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", html)]
    assert abs(sum(widths) - 100) < 0.1


def test_stats_are_a_dict_and_say_what_they_mean(bundled):
    stats = bundled.stats()
    assert dict(stats) == {**stats}
    text = str(stats)
    assert re.search(r"^  cache_hits +[\d,]+  look-ups that resumed after a prefix$", text, re.M)
    assert text_of(stats._repr_html_()).count("look-ups that resumed") == 1
    shown = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert shown == set(stats) and "Other" not in text.splitlines()


def test_numbers_of_speculation_have_words():
    stats = Stats(
        verifications=3, accepted_at_1=2, drafting_share=0.5, tokens_per_verification=None
    )
    rows = {name: (value, words) for name, value, words in stats.groups()["Speculation"]}
    assert rows["accepted_at_1"] == ("2", "drafts accepted in place 1 after the row's own token")
    assert rows["drafting_share"][0] == "50.0 %"
    assert rows["tokens_per_verification"][0] == "unknown"


@pytest.mark.parametrize("heading", MEANINGS)
def test_meanings_are_sentences_without_a_full_stop(heading):
    for words in MEANINGS[heading].values():
        assert words[0].islower() and not words.endswith(".")


def test_a_report_shows_what_fits_in_a_notebook_and_as_text():
    report = inspect_model("hybrid_7b", device="h100")
    said, html = str(report), text_of(report._repr_html_())
    for words in ("58.6 GiB for 128 rows", "24 Mamba2, 28 MLP, 4 Attention", "131,072"):
        assert words in said and words in html
    assert "for CUDA" in said and "--" not in said
    none = inspect_model("qwen3_next_80b", device="h100")
    assert "does not fit" in str(none) and "rows' own" not in none._repr_html_()
