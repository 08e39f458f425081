"""Blocks of every shape against their equations, written out one by one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Attention, Block, Layer, LowRank, Mamba2, ModelConfig
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.layers import attention, mamba2
from hybrid_jax.layers.mlp import mlp
from hybrid_jax.models import decoder
from tests import blocks
from tests.tiny_models import redrawn

VOCAB, EPS = 61, 1e-5
LENGTHS = jnp.array([19, 7])
TOKENS = jax.random.randint(jax.random.key(1), (2, 19), 0, VOCAB)


def model(name: str, norm_kind: str = "rms", **settings) -> tuple[ModelConfig, dict]:
    config = ModelConfig(
        family="blocks",
        vocab_size=VOCAB,
        width=blocks.WIDTH,
        layers=blocks.LAYERS[name],
        norm_kind=norm_kind,
        norm_eps=EPS,
        **settings,
    )
    return config, redrawn(config, seed=3)


class Written:
    """A model as a few lines of equations; every method is a line of a published layer."""

    def __init__(self, config: ModelConfig, params: dict) -> None:
        self.config, self.params = config, params
        self.embedded = jnp.where(self.real[..., None], params["embed"][TOKENS], 0)

    real = jnp.arange(TOKENS.shape[1]) < LENGTHS[:, None]

    def norm(self, x, weight):
        if self.config.norm_kind == "layer":
            x = x - x.mean(-1, keepdims=True)
            scaled = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS)
            return scaled * weight["gain"] + weight["bias"]
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def run(self, part, weights, x):
        whole = {Attention: attention.whole, Mamba2: mamba2.whole}.get(type(part))
        if whole is None:
            return mlp(weights, x, part.kind)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return whole(weights, x, positions, LENGTHS, part)

    def hidden(self):
        h, layers = self.embedded, self.params["layers"]
        for layer, own in zip(self.config.layers, layers, strict=True):
            h = self.layer(layer, own, h)
        return h

    def layer(self, layer: Layer, own: dict, h):
        raise NotImplementedError


class NormsAfter(Written):
    def layer(self, layer, own, h):
        mix, feed = (block.parts[0] for block in layer.blocks)
        if "after_norm" not in own:
            return plain(self, layer, own, h)
        h = h + self.norm(self.run(mix, own["mixers"][0], h), own["after_norm"])
        return h + self.norm(self.run(feed, own["mlp"], h), own["mlp_after_norm"])


class NormsBeforeAndAfter(Written):
    def layer(self, layer, own, h):
        mix, feed = (block.parts[0] for block in layer.blocks)
        if "after_norm" not in own:
            return plain(self, layer, own, h)
        made = self.run(mix, own["mixers"][0], self.norm(h, own["norm"]))
        h = h + 0.7 * self.norm(made, own["after_norm"])
        made = self.run(feed, own["mlp"], self.norm(h, own["mlp_norm"]))
        return h + 0.7 * self.norm(made, own["mlp_after_norm"])


class NormedResidual(Written):
    def layer(self, layer, own, h):
        mix, feed = (block.parts[0] for block in layer.blocks)
        adds = layer.blocks[0].adds
        if adds.keep == 1.0:
            return plain(self, layer, own, h)
        x = self.norm(h, own["norm"])
        h = adds.keep * (x if adds.of == "normed" else h) + adds.gain * self.run(
            mix, own["mixers"][0], x
        )
        x = self.norm(h, own["mlp_norm"])
        return adds.keep * (x if adds.of == "normed" else h) + adds.gain * self.run(
            feed, own["mlp"], x
        )


class SharedWithChanges(Written):
    def layer(self, layer, own, h):
        if len(layer.blocks) == 2:
            return plain(self, layer, own, h)
        first = self.params["layers"][0]
        (attention,), feed = first["mixers"], first["mlp"]
        qkv, up, down = attention["qkv"], feed["up"], feed["down"]
        (changes,) = own["mixers_changes"]
        qkv = qkv + changes["qkv"]["a"] @ changes["qkv"]["b"]
        if layer.blocks[1].change is not None:
            up, down = (
                old + change["a"] @ change["b"]
                for old, change in (
                    (up, own["mlp_changes"]["up"]),
                    (down, own["mlp_changes"]["down"]),
                )
            )
        x = self.norm(jnp.concatenate([h, self.embedded], axis=-1), first["norm"])
        aside = self.run(blocks.WIDE, attention | {"qkv": qkv}, x)
        aside = self.run(
            blocks.FEED,
            feed | {"up": up, "down": down},
            self.norm(aside, first["mlp_norm"]),
        )
        # The third block has the names of a second one with mixers.
        weights, norm = own["mixers_2"][0], own["norm_2"]
        return h + self.run(blocks.MAMBA, weights, self.norm(h + aside, norm))


class Looped(Written):
    def layer(self, layer, own, h):
        index = self.config.layers.index(layer)
        source = layer.blocks[0].weights
        return plain(self, layer, self.params["layers"][source[0] if source else index], h)


class FromAnotherPlace(Written):
    def layer(self, layer, own, h):
        first = self.params["layers"][0]
        if layer.blocks[0].weights is None:
            return plain(self, layer, own, h)
        h = h + self.run(blocks.FEED, first["mlp"], self.norm(h, first["mlp_norm"]))
        return h + self.run(blocks.ATTENTION, first["mixers"][0], self.norm(h, first["norm"]))


class SideBySide(Written):
    def layer(self, layer, own, h):
        x = self.norm(h, own["norm"])
        pairs = zip(layer.blocks[0].parts, own["mixers"], strict=True)
        return h + sum(self.run(part, weights, x) for part, weights in pairs)


def plain(self: Written, layer: Layer, own: dict, h):
    mix, feed = (block.parts[0] for block in layer.blocks)
    h = h + self.run(mix, own["mixers"][0], self.norm(h, own["norm"]))
    return h + self.run(feed, own["mlp"], self.norm(h, own["mlp_norm"]))


EQUATIONS = {
    "norms_after": NormsAfter,
    "norms_before_and_after": NormsBeforeAndAfter,
    "residual_of_the_normed_input": NormedResidual,
    "shared_with_changes": SharedWithChanges,
    "looped": Looped,
    "shared_from_another_place": FromAnotherPlace,
    "side_by_side_with_an_mlp": SideBySide,
}


@pytest.mark.parametrize("norm_kind", ["rms", "layer"])
@pytest.mark.parametrize("name", blocks.LAYERS)
def test_a_model_is_what_its_equations_say(name, norm_kind):
    config, params = model(name, norm_kind)
    written = EQUATIONS[name](config, params)
    h = written.norm(written.hidden(), params["norm"])
    wanted = np.asarray(h @ params["head"])
    got = np.asarray(decoder.forward(params, TOKENS, config, lengths=LENGTHS))
    real = np.asarray(written.real)
    np.testing.assert_allclose(got[real], wanted[real], rtol=2e-4, atol=2e-4)


def test_a_shared_block_has_no_weights_but_what_it_adds_to_them():
    _, params = model("shared_with_changes")
    first, _, again = params["layers"]
    own = ["mixers", "mixers_2", "mixers_changes", "mlp", "mlp_norm", "norm", "norm_2"]
    assert sorted(first) == own
    assert sorted(again) == ["mixers_2", "mixers_changes", "mlp_changes", "norm_2"]
    assert again["mixers_changes"][0]["qkv"]["a"].shape == (2 * blocks.WIDTH, 3)
    assert {"a", "b"} == set(again["mlp_changes"]["up"]) == set(again["mlp_changes"]["down"])
    _, params = model("looped")
    assert params["layers"][2:] == [{}, {}, {}]


@pytest.mark.parametrize("name", ["qkw", "q_norm", "out_bias"])
def test_only_matrices_of_a_part_change(name):
    block = Block(parts=(replace(blocks.ATTENTION, qk_norm=True, out_bias=True),))
    block = replace(block, change=LowRank(matrices=(name,), rank=2))
    config = ModelConfig(
        family="blocks", vocab_size=VOCAB, width=blocks.WIDTH, layers=(Layer(blocks=(block,)),)
    )
    with pytest.raises(ValueError, match=f"LowRank: matrices must be of out, qkv, got {name}"):
        model_weights(config)


@pytest.mark.parametrize("name", blocks.LAYERS)
def test_what_is_not_real_never_reaches_a_layer(name):
    """Its inputs, wherever padding stands, are those of zeros."""
    config, params = model(name)
    seen = []

    def mix(weights, given, spec, where):
        seen.append(given)
        return jnp.full((*given.shape[:2], blocks.WIDTH), jnp.nan)

    real = jnp.zeros(TOKENS.shape, bool)
    decoder.walk(params, TOKENS, real, config, mix)
    # The first block of a layer, at least, has nothing of the layers before it.
    per_layer = [len(layer.mixers) for layer in config.layers]
    firsts = [seen[sum(per_layer[:index])] for index in range(len(per_layer))]
    assert all(not np.isnan(np.asarray(x)).any() for x in firsts)


def test_what_is_read_together_is_wider_and_what_is_made_is_not():
    _, params = model("shared_with_changes")
    own = params["layers"][0]
    assert own["norm"].shape == (2 * blocks.WIDTH,)
    assert own["mixers"][0]["out"].shape[1] == blocks.WIDTH
