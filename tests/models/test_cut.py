"""A model with a cut, and the weights it starts from, beside the model without."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig, Rope, residual_layer, with_cut
from hybrid_jax.config.cut import WITH_CUT
from hybrid_jax.kinds.kind import Kind
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.cut import CutInput
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.initialize import random_params
from hybrid_jax.weights import load_model, save_orbax
from tests.tiny_models import MODELS, VOCAB, tiny_model

TOKENS = 45
logits = jax.jit(forward, static_argnums=2)
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), qkv_bias=True)
MAMBA = Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=2, proj_bias=True)


def tokens(count: int = TOKENS) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, count), 0, VOCAB)


def stack(*mixers) -> ModelConfig:
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=40)) for mixer in mixers)
    return ModelConfig(family="test", vocab_size=VOCAB, width=28, layers=layers)


def spread(params: dict) -> dict:
    """Norms and biases that matter."""
    rng = np.random.default_rng(3)

    def draw(leaf: jax.Array) -> jax.Array:
        return leaf + 0.3 * rng.standard_normal(leaf.shape, np.float32) if leaf.ndim == 1 else leaf

    return jax.tree.map(draw, params)


@pytest.mark.parametrize("name", ["with_two_shapes", "qwen3_next", "nemotron_h", "windowed"])
def test_after_the_last_layer_but_one_it_is_the_model_without(name):
    """The input of the last layer is the output of the cut."""
    config, params = tiny_model(name)
    cut = with_cut(config, len(config.layers) - 1)
    want, found = logits(params, tokens(), config), logits(cut_params(params, cut), tokens(), cut)
    assert float(jnp.abs(found - want).max()) <= 1e-5
    earlier = with_cut(config, 1)
    other = logits(cut_params(params, earlier), tokens(), earlier)
    assert float(jnp.abs(other - want).max()) > 1e-2


@pytest.mark.parametrize("mixer", [ATTENTION, MAMBA])
def test_biases_are_written_too(mixer):
    config = stack(ATTENTION, mixer)
    params = spread(random_params(config, 0))
    cut = with_cut(config, 1)
    found = cut_params(params, cut)
    assert "write_bias" in found["cut"]
    want = logits(params, tokens(), config)
    assert float(jnp.abs(logits(found, tokens(), cut) - want).max()) <= 1e-5
    found["cut"]["write_bias"] = jnp.zeros_like(found["cut"]["write_bias"])
    assert float(jnp.abs(logits(found, tokens(), cut) - want).max()) > 1e-3


def test_no_later_layer_is_the_same_model():
    config, _ = tiny_model("bamba")
    assert with_cut(config, len(config.layers)) is config


def test_groups_of_one_are_no_groups():
    config = stack(ATTENTION, ATTENTION, ATTENTION)
    assert with_cut(config, 1, kv_group=1, state_group=1) == with_cut(config, 1)


def test_layers_with_the_same_keys_may_share_them():
    """With equal weights of K and V in a group, sharing changes nothing."""
    config = stack(ATTENTION, *[ATTENTION] * 4)
    params = spread(random_params(config, 0))
    q = ATTENTION.num_heads * ATTENTION.head_dim
    layers = params["layers"]
    for follower, first in ((2, 1), (4, 3)):
        layers[follower]["norm"] = layers[first]["norm"]
        for name in ("qkv", "qkv_bias"):
            own, other = (layers[place]["mixers"][0] for place in (follower, first))
            own[name] = jnp.concatenate([own[name][..., :q], other[name][..., q:]], axis=-1)
    alone, shared = with_cut(config, 1), with_cut(config, 1, kv_group=2)
    want = logits(cut_params(params, alone), tokens(), alone)
    found = cut_params(params, shared)
    np.testing.assert_allclose(logits(found, tokens(), shared), want, atol=1e-5)
    assert found["cut"]["write"].shape[1] == 2 * 2 * ATTENTION.num_kv_heads * ATTENTION.head_dim
    everyone = with_cut(config, 1, kv_group=4)
    other = logits(cut_params(params, everyone), tokens(), everyone)
    assert float(jnp.abs(other - want).max()) > 1e-3


def test_a_shared_state_is_the_recurrence_of_the_first_layer():
    """The second layer's output, token by token: its own C, gate, skip and projection on the first one's state."""
    plain = stack(ATTENTION, MAMBA, MAMBA)
    config = with_cut(plain, 1, state_group=2)
    params = spread(random_params(config, 0))
    first, second = (params["layers"][place]["mixers"][0] for place in (1, 2))
    inputs = jax.random.normal(jax.random.key(2), (TOKENS, config.width))
    own = jax.random.normal(jax.random.key(3), (TOKENS, config.width))
    written = inputs @ params["cut"]["write"] + params["cut"]["write_bias"]
    sizes = [MAMBA.inner_size, MAMBA.num_groups * MAMBA.state_size]
    sizes += [sizes[1], MAMBA.num_heads]
    raw, dt, C2 = jnp.split(written, [sum(sizes[:3]), sum(sizes)], axis=1)
    padded = jnp.concatenate([jnp.zeros((3, raw.shape[1])), raw])
    xBC = first["conv_bias"] + sum(
        padded[w : w + TOKENS] * first["conv"][w] for w in range(MAMBA.conv_width)
    )
    x, B, _ = jnp.split(jax.nn.silu(xBC), [sizes[0], sizes[0] + sizes[1]], axis=1)
    x, B = x.reshape(TOKENS, 6, 4), jnp.repeat(B.reshape(TOKENS, 2, 8), 3, axis=1)
    made = own @ second["in_proj"] + second["in_bias"]
    z = made[:, : sizes[0]]
    C2 = jnp.repeat(jax.nn.silu(C2).reshape(TOKENS, 2, 8), 3, axis=1)
    dt = jax.nn.softplus(dt + first["dt_bias"])
    state, want = jnp.zeros((6, 4, 8)), []
    for t in range(TOKENS):
        decay = jnp.exp(-dt[t] * jnp.exp(first["A_log"]))[:, None, None]
        state = decay * state + (dt[t][:, None] * x[t])[..., None] * B[t][:, None]
        y = (state * C2[t][:, None]).sum(-1) + second["D"][:, None] * x[t]
        y = y.reshape(-1) * jax.nn.silu(z[t])
        y = second["norm"] * y / jnp.sqrt((y * y).mean() + MAMBA.norm_eps)
        want.append(y @ second["out_proj"] + second["out_bias"])
    columns = sum(sizes)
    specs = [config.layers[place].mixers[0] for place in (1, 2)]
    span = (None, jnp.array([TOKENS]))
    stream = mamba2.write(first, CutInput(None, written[None, :, :columns]), *span, specs[0])
    given = CutInput(own[None], written[None, :, columns:])
    found = mamba2.read_whole(second, given, stream, *span, specs[1])
    np.testing.assert_allclose(found[0], jnp.stack(want), atol=2e-5)


def test_it_is_stored_and_read_as_any_model(tmp_path):
    config, params = tiny_model("with_cut")
    save_orbax(tmp_path / "model", config, params)
    read, weights = load_model(tmp_path / "model")
    assert read == config
    jax.tree.map(np.testing.assert_array_equal, weights, params)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("bamba", {"cut": 0}, "at least 1 and below the number of layers, 2, got 0"),
        ("bamba", {"cut": 3}, "at least 1 and below the number of layers, 2, got 3"),
        (
            "jamba",
            {"cut": 1},
            r"layer 2 \(the first is 0\) is Mamba1, which has no form after a cut, only Attention",
        ),
        (
            "lfm2",
            {"cut": 1},
            r"layer 2 \(the first is 0\) is ShortConv, which has no form after a cut",
        ),
        (
            "shared",
            {"cut": 2},
            r"layer 2 \(the first is 0\) shares weights, or is not of the usual form",
        ),
        ("llama", {"cut": 1, "kv_group": 2}, "kv_group must divide .* after the cut, 1, got 2"),
        ("llama", {"cut": 1, "state_group": 2}, "state_group must divide .*, 0, got 2"),
        ("llama", {"cut": 1, "kv_group": 0}, "kv_group must divide .* after the cut, 1, got 0"),
        ("with_cut", {"cut": 1}, "has a cut after layer 2 already"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        with_cut(MODELS[name](), settings.pop("cut"), **settings)


def test_the_mixers_that_may_stand_after_a_cut_are_those_whose_kinds_name_their_parts():
    own = {spec: kind for spec, kind in KINDS.items() if spec.__module__.startswith("hybrid_jax.")}
    named = {spec for spec, kind in own.items() if type(kind).parts is not Kind.parts}
    assert named == set(WITH_CUT) and all(KINDS[spec].projection for spec in named)


def test_layers_that_differ_cannot_share():
    other = replace(ATTENTION, head_dim=16)
    with pytest.raises(ValueError, match="that share must be alike; with kv_group 2"):
        with_cut(stack(ATTENTION, ATTENTION, other), 1, kv_group=2)
    delta = MODELS["qwen3_next"]().layers[0].mixers[0]
    with pytest.raises(
        ValueError, match="delta nets cannot share states, so state_group must be 1"
    ):
        with_cut(stack(ATTENTION, delta, delta), 1, state_group=2)


def test_a_config_that_says_two_things_is_refused():
    config = MODELS["with_cut"]()
    with pytest.raises(ValueError, match="cut must be given if layers write from it; use"):
        replace(config, cut=None)
    with pytest.raises(ValueError, match="layers must be those that config.cut.with_cut makes"):
        replace(config, cut=3)
    with pytest.raises(ValueError, match="mtp must be empty if there is a cut, because"):
        replace(config, mtp=config.layers[:1])
    with pytest.raises(ValueError, match="draft must be a model without a cut, got one with cut 2"):
        replace(MODELS["bamba"](), draft=config)
