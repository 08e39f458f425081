"""Public entry of token sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton
from pallas_kernels.arguments import check, check_array
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.token_sampling.kernel import sample_tokens_pallas
from pallas_kernels.token_sampling.reference import Arrays, sample_tokens_reference


def _sample_tokens_triton(arrays: Arrays) -> jax.Array:
    from pallas_kernels.token_sampling.triton_kernel import sample_tokens_triton

    return sample_tokens_triton(arrays)


IMPLEMENTATIONS = {
    "reference": sample_tokens_reference,
    "pallas": sample_tokens_pallas,
    "triton": _sample_tokens_triton,
}


def sample_tokens(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    banned: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The largest of logits / temperature + Gumbel noise over the tokens that the filters keep, in this order:

    min_p keeps what is at least min_p times as likely as the most likely token; top-k the k most likely of those;
    top-p the most likely of those that together hold top_p of what is left. Ties at an edge all stay. The noise
    is a hash of key and token id, so a row's token depends on nothing else in the batch.

    Args:
        logits: float32[B, V]. keys: uint32[B, 2].
        temperature: float32[B], 0 takes the largest logit, the first of equal ones.
        top_k: int32[B], 0 for no limit. top_p: float32[B], 1 for no limit. min_p: float32[B], 0 for no limit.
        banned: int32[B, n] tokens that are not drawn, -1 where unused; n may be 0. A NaN is not drawn either.
        implementation: "reference", "pallas", "triton", or None to choose among the first two. A named one never
            falls back.

    Returns:
        int32[B].

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones(1)
        >>> rest = {"temperature": 0 * one, "top_k": jnp.zeros(1, int), "top_p": one, "min_p": 0 * one}
        >>> keys, banned = jnp.zeros((1, 2), jnp.uint32), jnp.array([[2]])
        >>> sample_tokens(jnp.array([[0.5, 1.0, 9.0]]), keys, **rest, banned=banned).item()
        1
    """
    where = "sample_tokens"
    check_array(where, "banned", banned)
    if banned.shape[-1:] == (0,):
        banned = jnp.full((*banned.shape[:-1], 1), -1, jnp.int32)
    arrays = Arrays(logits, keys, temperature, top_k, top_p, min_p, banned)
    check(where, arrays)
    no_triton = jax_triton.why_unavailable() if implementation == "triton" else None
    return run(where, implementation, IMPLEMENTATIONS, arrays, no_triton=no_triton)
