"""Which states the scan in Triton takes. No jax."""

from __future__ import annotations

from pallas_kernels.plan import power_of_two

# Elements of a head's state: with more, 4 warps run out of registers, and 8 share products too small for them.
MAX_STATE = 64 * 128
LEAST_SIDE = 16  # of a product on tensor cores


def sides(head_dim: int, state_size: int) -> tuple[int, int]:
    """Of a head's state as the kernels hold it."""
    P, R = (max(power_of_two(side), LEAST_SIDE) for side in (head_dim, state_size))
    return P, R


def why_not_triton(head_dim: int, state_size: int, dtype: str) -> str | None:
    """Why the kernels cannot take states and inputs like these, wherever they run; None if they can."""
    if dtype != "bfloat16":
        return f"inputs must be bfloat16 for 'triton', got {dtype}; use 'pallas'"
    P, R = sides(head_dim, state_size)
    if P * R > MAX_STATE:
        return (
            f"a head's state must have at most {MAX_STATE} elements for 'triton', got "
            f"{head_dim} x {state_size}; use 'pallas'"
        )
    return None
