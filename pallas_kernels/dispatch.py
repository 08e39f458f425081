"""Choosing an implementation by name, the same way for every kernel package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Implementation = Literal["reference", "xla", "pallas", "triton"]
HIGHEST = jax.lax.Precision.HIGHEST


def run(
    where: str,
    implementation: str | None,
    available: dict[str, Callable],
    arrays: Any,
    *,
    unsupported: str | None = None,
    no_triton: str | None = None,
    differentiable: bool = False,
    launch: dict[str, Any] | None = None,
    **static: Any,
):
    """Calls the named implementation, or for None the one for the platform the program is lowered for.

    Args:
        where: public function, for messages.
        available: implementations by name, all of one signature. "reference" is the definition; "xla" is there where
            XLA makes more of another form.
        arrays: their first argument, a NamedTuple. static: the others.
        unsupported: why "pallas" cannot take these arguments, or None if it can.
        no_triton: the same of "triton".
        differentiable: "pallas" brings a derivative of its own; otherwise it has none, and None takes that of the
            form for other platforms.
        launch: what only "pallas" is told besides.

    Raises:
        ValueError: no implementation has that name.
        NotImplementedError: "pallas" or "triton" was asked for and cannot.
    """
    arrays = jax.tree.map(jnp.asarray, arrays)  # numpy's, too
    if implementation is None:
        plain = functools.partial(available.get("xla", available["reference"]), **static)
        if unsupported is not None or "pallas" not in available:
            return plain(arrays)
        pallas = functools.partial(available["pallas"], **static, **(launch or {}))
        either = functools.partial(jax.lax.platform_dependent, cuda=pallas, default=plain)
        return (either if differentiable else _differentiated_as(either, plain))(arrays)
    if not isinstance(implementation, str) or implementation not in available:
        raise ValueError(
            f"{where}: implementation must be one of {sorted(available)}, got {implementation!r}"
        )
    if implementation == "pallas":
        static |= launch or {}
    named = functools.partial(available[implementation], **static)
    if implementation not in ("pallas", "triton"):
        return named(arrays)
    reason = unsupported if implementation == "pallas" else no_triton
    if reason is not None:
        raise NotImplementedError(f"{where}: {reason}")
    if differentiable:
        return named(arrays)
    underived = functools.partial(_no_derivative, where, implementation)
    return _differentiated_as(named, underived)(arrays)


def _differentiated_as(function: Callable, other: Callable) -> Callable:
    """The function of one argument, with the derivatives of another one that computes the same.

    A kernel's own would be wrong without a word: states reach it as bits, through which nothing is differentiated.
    """
    called = jax.custom_jvp(function)
    called.defjvp(functools.partial(jax.jvp, other))
    return called


def _no_derivative(where: str, implementation: str, arrays: Any):
    raise NotImplementedError(
        f"{where}: {implementation!r} has no derivative; leave the choice to None, which has one"
    )
