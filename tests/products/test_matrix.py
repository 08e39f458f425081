"""Models whose matrices are kept as codes, and a backend that the package does not have: everything follows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import BACKENDS, XLA
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.formats import DENSE
from hybrid_jax.costs import weight_bytes
from hybrid_jax.kinds.kind import all_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.models.checkpoint import open_checkpoint
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.initialize import random_params
from hybrid_jax.models.matrices import with_matrices
from hybrid_jax.products.matrix import as_matrix, product
from hybrid_jax.products.xla import linear
from hybrid_jax.weights import BUNDLED
from hybrid_jax.weights.hugging_face import load_hf
from hybrid_jax.weights.load import load_model
from hybrid_jax.weights.orbax import save_orbax
from tests.drawing import left_to_all
from tests.engine.on_kernels import engine_of, outputs
from tests.exactness.engines import one_shape
from tests.products import backend_of_its_own
from tests.products.cases import CASES, Case, kept
from tests.tiny_models import tiny_model

# Every kind of layer, and experts; tied and other heads; a cut.
NAMES = ["nemotron_h_moe", "qwen3_next", "lfm2", "jamba", "with_cut_delta"]


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def narrow(name: str, case: Case):
    """A tiny model with matrices of a format, and the same numbers in dense ones."""
    config = kept(tiny_model(name)[0], case.format)
    params = random_params(config, 0)
    bound = with_matrices(params, config, XLA)
    dense = jax.tree.map(
        lambda leaf: leaf.values if hasattr(leaf, "values") else leaf,
        bound,
        is_leaf=lambda leaf: hasattr(leaf, "operations"),
    )
    return config, params, dense


@left_to_all(*(f"{case}-xla-{name}" for case in list(CASES)[1:] for name in NAMES[:-1]))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kernels", ["xla", pytest.param("pallas", marks=[pytest.mark.slow, left_to_all])]
)
def test_a_format_of_its_own_runs_in_every_kind_of_layer(case, name, kernels):
    """Chunks, decoding, sampling and hits: the tokens of the same numbers in dense matrices."""
    config, params, dense = narrow(name, case)
    plain, room = replace(config, matrices=()), {"memory": 192 << 10}
    with one_shape(16):
        want, hits = outputs(engine_of(kernels, plain, dense, **room), adjusted=False)
        got, same_hits = outputs(engine_of(kernels, config, params, **room), adjusted=False)
    assert got == want
    assert same_hits == hits > 0


def test_bytes_and_random_values_follow_from_the_format(case):
    config, params, dense = narrow("nemotron_h_moe", case)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert (
        weight_bytes(config, "float32")
        == held
        < case.share * weight_bytes(replace(config, matrices=()), "float32")
    )
    found = [weight for weight in all_weights(model_weights(config)) if weight.format != DENSE]
    assert {weight.draw for weight in found} == {"matrix", "output"}
    assert {weight.format for weight in found} > {case.format}  # and of several formats
    tokens = jnp.arange(12)[None]
    want = forward(dense, tokens, replace(config, matrices=()))
    got = forward(with_matrices(params, config, XLA), tokens, config)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_second_model_keeps_its_own_format(case):
    config = tiny_model("bamba")[0]
    place = "layers.0.mlp.down"
    for own, other in (((place, case.format),), ()), ((), ((place, case.format),)):
        draft = replace(config, matrices=other)
        tree = model_weights(replace(config, matrices=own, draft=draft))
        found = [part["layers"][0]["mlp"]["down"].format for part in (tree, tree["draft"])]
        assert found == [case.format if formats else DENSE for formats in (own, other)]


def test_files_are_read_into_the_format_and_written_from_it(case, tmp_path):
    bundled = open_checkpoint(BUNDLED)
    config = kept(bundled.config, case.format)
    read, params = load_hf(bundled, config, "float32", lambda *bytes_: None)
    weight = model_weights(config)["layers"][0]["mlp"]["down"]
    down = params["layers"][0]["mlp"]["down"]
    described = jax.tree.map(lambda array: ArraySpec(array.shape, array.dtype.name), down)
    assert read.matrices == config.matrices and described == weight.specs("float32")
    save_orbax(tmp_path / "model", read, params)
    again, stored = load_model(tmp_path / "model")
    assert again == read
    jax.tree.map(np.testing.assert_array_equal, stored, params)
    plain = load_hf(bundled, bundled.config, "float32", lambda *bytes_: None)[1]
    numbers = np.asarray(as_matrix(plain["layers"][0]["mlp"]["down"]).values)
    bound = with_matrices(params, read, XLA)["layers"][0]["mlp"]["down"]
    assert 0 < np.abs(bound.values - numbers).max() <= case.error * np.abs(numbers).max()


def test_a_product_of_columns_is_that_of_the_whole(case):
    config, params, _ = narrow("nemotron_h_moe", case)
    matrix = with_matrices(params, config, XLA)["head"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, config.width)), jnp.float32)
    want = linear(x, matrix.values)
    np.testing.assert_allclose(product(x, matrix.columns(slice(3, 9))), want[:, 3:9], atol=1e-6)
    assert matrix.shape == (config.width, config.vocab_size) and matrix.dtype == jnp.float32
    np.testing.assert_array_equal(matrix.rows(jnp.array([2, 0])), matrix.values[jnp.array([2, 0])])


def test_a_change_is_added_to_a_product_with_its_bias(case):
    config, params, _ = narrow("nemotron_h_moe", case)
    matrix = with_matrices(params, config, XLA)["head"]
    rng = np.random.default_rng(1)
    inner, columns = matrix.shape
    x, a, b, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((3, inner), (inner, 2), (2, columns), (columns,))
    )
    changed, want = matrix.changed(a, b), linear(x, matrix.values + a @ b)
    np.testing.assert_allclose(product(x, changed), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(product(x, changed, bias), want + bias, rtol=1e-4, atol=1e-4)
    some = slice(3, 9)
    np.testing.assert_allclose(
        product(x, changed.columns(some)), want[:, some], rtol=1e-4, atol=1e-4
    )


def test_a_backend_of_its_own_is_one_entry():
    """Its products, on a CPU, and everything else of XLA: the same tokens, and each matrix went through it."""
    config, params = tiny_model("bamba")
    own = replace(XLA, name="own", about="products of a test", products=backend_of_its_own.__name__)
    backend_of_its_own.COUNTS.clear()
    with one_shape(16), mock.patch.dict(BACKENDS, {"own": own}):
        want, hits = outputs(engine_of("xla", config, params), adjusted=False)
        assert not backend_of_its_own.COUNTS
        engine = engine_of("own", config, params)
        assert engine.backend == own
        assert outputs(engine, adjusted=False) == (want, hits)
    shapes = {
        weight.shape
        for weight in all_weights(model_weights(config))
        if weight.is_matrix and weight.draw != "embedding"
    }
    assert shapes <= Counter(backend_of_its_own.COUNTS).keys()
