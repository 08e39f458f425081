"""The exported directory: loads to the same weights, and its tokens are bytes."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_jax.models.initialize import random_params
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.train.data import END, PAD, SPECIAL_TOKENS
from hybrid_jax.train.export import byte_tokenizer, rounded, write_model
from hybrid_jax.weights import load_model

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def redrawn(small_config):
    """Parameters without a default left in them: ones and zeros hide swapped tensors."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda p: p + rng.standard_normal(p.shape).astype(np.float32),
        random_params(small_config, 0),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small_fields, redrawn):
    path = tmp_path_factory.mktemp("exported")
    write_model(path, redrawn, small_fields)
    return path


def test_loading_gives_the_rounded_weights_bit_for_bit(folder, small_config, redrawn):
    config, params = load_model(folder, dtype="float32")
    assert replace(config, dtype="float32") == small_config
    expected = rounded(redrawn, small_config)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    mixer, original = params["layers"][0]["mixers"][0], redrawn["layers"][0]["mixers"][0]
    assert np.array_equal(mixer["A_log"], original["A_log"])  # float32 on disk
    assert not np.array_equal(mixer["in_proj"], original["in_proj"])  # bfloat16 on disk


def test_stored_dtype_is_bfloat16(folder):
    config, params = load_model(folder)
    assert config.dtype == "bfloat16"
    assert params["embed"].dtype == "bfloat16"
    assert params["layers"][0]["mixers"][0]["dt_bias"].dtype == "float32"


def test_special_tokens_agree_between_the_files(folder):
    tokenizer = Tokenizer.from_directory(folder)
    config, _ = load_model(folder)
    assert tokenizer.vocab_size == config.vocab_size == 256 + len(SPECIAL_TOKENS)
    assert config.eos_token_ids == (tokenizer.eos_token_id,) == (END,)
    assert config.bos_token_id == tokenizer.bos_token_id == END
    assert tokenizer.encode("a<|endoftext|>b<|pad|>") == [97, END, 98, PAD]
    assert tokenizer.decode([97, END, 98, PAD]) == "ab"


def test_leftover_partial_files_do_not_remain(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@given(st.text())
def test_text_becomes_its_utf8_bytes_and_comes_back(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text
    if not any(name in text for name in SPECIAL_TOKENS):
        assert ids == list(text.encode())


def test_every_byte_is_a_token_of_its_own_value():
    for byte in range(128):
        assert TOKENIZER.encode(chr(byte)).ids == [byte]
    decoded = [TOKENIZER.id_to_token(byte) for byte in range(256)]
    assert len(set(decoded)) == 256 and None not in decoded
    assert TOKENIZER.decode(list("ä€🐍".encode())) == "ä€🐍"


def test_a_broken_character_decodes_to_the_replacement_sign_and_harms_no_neighbour():
    snake = list("🐍".encode())
    assert TOKENIZER.decode([97, *snake[:2]]).startswith("a\ufffd")
    assert TOKENIZER.decode([snake[-1], 98]) == "\ufffdb"
    assert TOKENIZER.decode([0xFF, *b"ok"]) == "\ufffdok"
