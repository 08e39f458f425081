"""Public entry of token sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton
from pallas_kernels.arguments import check, check_array
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.token_sampling.kernel import sample_tokens_pallas
from pallas_kernels.token_sampling.reference import SamplingArrays, sample_tokens_reference
from pallas_kernels.token_sampling.xla import sample_tokens_xla


def _sample_tokens_triton(arrays: SamplingArrays) -> jax.Array:
    from pallas_kernels.token_sampling.triton_kernel import sample_tokens_triton

    return sample_tokens_triton(arrays)


IMPLEMENTATIONS = {
    "reference": sample_tokens_reference,
    "xla": sample_tokens_xla,
    "pallas": sample_tokens_pallas,
    "triton": _sample_tokens_triton,
}


def sample_tokens(
    arrays: SamplingArrays, *, implementation: Implementation | None = None
) -> jax.Array:
    """The largest of logits / temperature + Gumbel noise over the tokens that the filters keep, in this order:

    min_p keeps what is at least min_p times as likely as the most likely token; top-k the k most likely of those;
    top-p the most likely of those that together hold top_p of what is left. Ties at an edge all stay. The noise
    is a hash of key and token id, so a row's token depends on nothing else in the batch.

    Args:
        implementation: "reference", "xla", "pallas", "triton", or None to choose "pallas" or "xla". A named one never
            falls back.

    Returns:
        int32[B].

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones(1)
        >>> rest = {"temperature": 0 * one, "top_k": jnp.zeros(1, int), "top_p": one, "min_p": 0 * one}
        >>> logits, keys = jnp.array([[0.5, 1.0, 9.0]]), jnp.zeros((1, 2), jnp.uint32)
        >>> sample_tokens(SamplingArrays(logits, keys, **rest, banned=jnp.array([[2]]))).item()
        1
    """
    where, banned = "sample_tokens", arrays.banned
    check_array(where, "banned", banned)
    if banned.shape[-1:] == (0,):
        none = jnp.full((*banned.shape[:-1], 1), -1, jnp.int32)
        arrays = arrays._replace(banned=none)
    check(where, arrays)
    floats = {name: getattr(arrays, name) for name in ("temperature", "top_p", "min_p")}
    arrays = arrays._replace(**{name: x.astype(jnp.float32) for name, x in floats.items()})
    no_triton = jax_triton.why_unavailable() if implementation == "triton" else None
    return run(where, implementation, IMPLEMENTATIONS, arrays, no_triton=no_triton)
