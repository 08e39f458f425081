"""Versions of Triton and jax-triton that cannot be used are named with the remedy; the order of pointers."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval

from pallas_kernels import jax_triton


@pytest.mark.parametrize(
    "triton, called, reason",
    [
        ("3.8.0", "0.4.1", None),
        ("3.6.0", "1.0", None),
        ("3.9.0", "0.4.1", "needs triton below 3.9, found 3.9.0: pip install 'triton<3.9'"),
        ("3.9rc1", "0.4.1", "needs triton below 3.9, found 3.9rc1: pip install 'triton<3.9'"),
        ("3.10.0rc1", "0.4.1", "needs triton below 3.9, found 3.10.0rc1: pip install 'triton<3.9'"),
        (
            *("3.8.0", "0.3.1"),
            "needs jax-triton 0.4 or newer, found 0.3.1: with Python 3.12 or newer, pip install 'hybrid_jax[triton]'",
        ),
    ],
)
def test_versions(triton, called, reason):
    assert jax_triton.why_versions(triton, called) == reason


def test_a_missing_package_is_named(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    jax_triton.why_unavailable.cache_clear()
    assert (
        jax_triton.why_unavailable()
        == "needs the package triton: with Python 3.12 or newer, pip install 'hybrid_jax[triton]'"
    )
    jax_triton.why_unavailable.cache_clear()


def test_what_is_in_place_comes_after_the_outputs(monkeypatch):
    """A GPU gives a kernel its inputs' pointers, then those of what it makes, in this order and as many as it takes."""
    given = {}

    def triton_call(*inputs, out_type, input_output_aliases, **_):
        given.update(out_type=out_type, aliases=input_output_aliases)
        return [like.shape for like in out_type]

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    arrays = [jnp.zeros(size) for size in (2, 3, 5)]
    outputs = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (7, 11)]
    made = jax_triton.call(None, *arrays, outputs=outputs, in_place=[0, 2], grid=(1,), num_warps=1)
    assert [like.shape for like in given["out_type"]] == [(7,), (11,), (2,), (5,)]
    assert given["aliases"] == {0: 2, 2: 3}
    assert made == ((2,), (5,), (7,), (11,))


def as_jax_triton_0_4_1(used_outs, eqn):
    return [True] * len(eqn.invars), eqn


def test_a_rule_for_dead_code_gets_the_form_that_jax_asks_for():
    """jax 0.12 tells a rule three things, where that of jax-triton 0.4.1 takes two."""
    call, equation = Primitive("called"), SimpleNamespace(invars=["x", "y"])
    rules: dict = {call: as_jax_triton_0_4_1}
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        rules[call]([False], [True, True], equation)
    for _ in range(2):  # and once only
        jax_triton._mend_rule(rules, call)
        assert rules[call]([False], [True, True], equation) == ([True, True], equation)


def test_a_rule_that_has_the_form_already_stays():
    def newer(used_outs, live_ins, eqn):
        return live_ins, eqn

    call, other = Primitive("called"), Primitive("other")
    rules = {call: newer}
    jax_triton._mend_rule(rules, call)
    jax_triton._mend_rule(rules, other)
    jax_triton._mend_rule(rules, None)
    assert rules == {call: newer}


def test_a_jit_with_a_call_of_jax_triton_compiles(monkeypatch):
    """A stand-in for jax-triton 0.4.1, whose call is used and unused in the same program."""
    call = Primitive("as_triton_kernel_call")
    call.def_abstract_eval(lambda x: x)
    mlir.register_lowering(call, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    monkeypatch.setitem(partial_eval.dce_rules, call, as_jax_triton_0_4_1)
    library = SimpleNamespace(triton_kernel_call_p=call)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_lib=library))
    jax_triton.load()

    @jax.jit
    def program(x):
        call.bind(x)
        return jax.lax.fori_loop(0, 3, lambda _, y: call.bind(y), x)

    np.testing.assert_array_equal(program(jnp.ones(3)), [8.0, 8, 8])
