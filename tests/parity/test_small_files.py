"""A directory's small files mean what transformers makes of them, in every combination.

The answers of transformers are stored; make_small_files.py wrote them. Where `LLM` differs on purpose, this is said
here: `decode` of transformers, for one, has its own ways with spaces, which play no part with these tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_jax.api.options import default_params
from hybrid_jax.config.model_directory import carried
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.weights import load_config
from tests.drawing import covering, left_to_all
from tests.parity.small_files import ANSWERS, GENERATION, TEXTS, VARIANTS, combinations, write

STORED = json.loads(ANSWERS.read_text(encoding="utf-8"))


def cases(variants, stored):
    """Few combinations in which each variant of each file occurs, and the rest for `make test-all`."""
    chosen = list(combinations(variants))
    few = set(covering([tuple(names.values()) for names in chosen]))
    pairs = zip(chosen, stored["numbers"], strict=True)
    return [
        pytest.param(
            names,
            stored["answers"][number],
            id="-".join(names.values()),
            marks=() if place in few else left_to_all,
        )
        for place, (names, number) in enumerate(pairs)
    ]


def ours(folder: Path) -> dict:
    """What we make of what make_small_files.py asks transformers."""
    made = Tokenizer.from_directory(folder)
    return {
        "ids": [made.encode(text) for text in TEXTS],
        "plain ids": [made.encode(text, add_special_tokens=False) for text in TEXTS],
        "texts": [
            [made.decode(made.encode(text), skip_special_tokens=skip) for text in TEXTS]
            for skip in (False, True)
        ],
        "size": made.vocab_size,
        "special": made.special_tokens,
        "ends": [made.bos_token_id, made.eos_token_id],
        "templates": made.chat_templates,
    }


@pytest.mark.parametrize("chosen, theirs", cases(VARIANTS, STORED["tokenizer"]))
def test_tokenizer_and_templates_are_those_of_transformers(tmp_path, chosen, theirs):
    folder = write(tmp_path / "model", chosen)
    assert ours(folder) == theirs
    copy = tmp_path / "copy"
    for path in carried(folder):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((folder / path).read_bytes())
    assert ours(copy) == theirs


@pytest.mark.parametrize("chosen, theirs", cases(GENERATION, STORED["generation"]))
def test_sampling_and_end_tokens_are_those_of_transformers(tmp_path, chosen, theirs):
    """But for two things: end tokens of config.json count beside others, and without `do_sample` a model is sampled."""
    folder = write(tmp_path / "model", chosen)
    ends = theirs["eos_token_id"]
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    assert set(ends) <= set(load_config(folder).eos_token_ids)
    made = default_params(folder)
    assert made.temperature == (0.0 if theirs["do_sample"] is False else theirs["temperature"])
    assert made.top_k == (theirs["top_k"] or 0)
    assert made.top_p == (1.0 if theirs["top_p"] is None else theirs["top_p"])
    assert made.min_p == (theirs["min_p"] or 0.0)
    assert made.repetition_penalty == (theirs["repetition_penalty"] or 1.0)
    assert made.max_tokens == theirs["max_new_tokens"]
