"""Quantised files that are damaged give one clear line, and odd ones are read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybrid_jax.weights import load_model
from tests.drawing import EVERYTHING
from tests.parity.narrow.damage import DAMAGES
from tests.parity.narrow.files import VARIANTS, files

SEEDS = 500 if EVERYTHING else 20  # make test-all takes all
REFUSED = (ValueError, NotImplementedError, FileNotFoundError)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: f"{one.variant}: {one.wrong}")
def test_damage_gives_one_clear_line(tmp_path, damage):
    made, words = damage.make()
    folder = made.write(tmp_path / "model")
    if not words:
        load_model(folder)
        return
    with pytest.raises(REFUSED) as error:
        load_model(folder)
    said = str(error.value)
    assert "\n" not in said
    assert [word for word in words if word not in said] == [], said


def damaged(seed: int):
    """A variant with something wrong in one tensor, or in one field of `quantization_config`."""
    draw = random.Random(seed)
    made = files(draw.choice(sorted(VARIANTS)))
    name = draw.choice(sorted(made.tensors))
    tensor = made.tensors[name]
    about = made.config.get("quantization_config")
    ways = ["removed", "renamed", "dtype", "shape", "cut"] + ["field"] * 3 * bool(about)
    way = draw.choice(ways)
    if way == "removed":
        del made.tensors[name]
    elif way == "renamed":
        made.tensors[name + draw.choice(["s", "_2", ".x"])] = made.tensors.pop(name)
    elif way == "dtype":
        dtype = draw.choice([np.int8, np.uint8, np.int16, np.int32, np.int64, np.float16, float])
        with np.errstate(all="ignore"):
            made.tensors[name] = tensor.astype(np.float32).astype(dtype)
    elif way == "shape":
        changes = [lambda t: t.reshape(-1), lambda t: t[None], lambda t: t.reshape(-1)[:1]]
        made.tensors[name] = draw.choice(changes)(tensor)
    elif way == "cut":
        made.cut = draw.randrange(1, 5000)
    else:
        held = about
        while isinstance(held, dict) and held:
            key = draw.choice(sorted(held))
            if not isinstance(held[key], dict) or draw.random() < 0.2:
                held[key] = draw.choice([None, 3, -1, "text", [], [1], {}, {"a": 1}, 0.5, True])
                break
            held = held[key]
    return made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_damage_gives_a_model_or_one_line(tmp_path, seed):
    folder = damaged(seed).write(tmp_path / "model")
    try:
        load_model(folder)
    except REFUSED as error:
        said = str(error)
        assert "\n" not in said
        assert said.startswith("load_model:") or said.startswith(str(folder)), said
