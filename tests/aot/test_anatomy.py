"""The forms of a loop that `benchmarks/on_gpu/anatomy.py` measures: what the host starts in each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.on_gpu.anatomy import FORMS
from tests.aot.chip import compile_for_gpu

OUTER = {
    "graph": {"kCommandBuffer"},
    "independent": {"kCommandBuffer"},
    "outside": {"kCopy", "kWhile"},
    "async": {"kCopy", "kWhile"},
    "unbuffered": set(),  # XLA has nothing to put together
}


def loop(count, x):
    """Some products and sums, one after the other."""

    def step(carry):
        number, x, total = carry
        return number + 1, jnp.tanh(x @ x), total + jnp.sort(x[0])

    carry = jax.lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), x, x[0]))
    return carry[1:]


@pytest.mark.parametrize("name", OUTER)
def test_a_form_compiles_to_what_it_is_called(name):
    shapes = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16))
    found = compile_for_gpu(loop, *shapes, options=FORMS[name].options)
    assert set(found.outer) == OUTER[name] and found.kinds["kWhile"] == 1


def test_every_form_with_a_loop_is_compiled_here():
    assert OUTER.keys() == {name for name, form in FORMS.items() if form.inside}
