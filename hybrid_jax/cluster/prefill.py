"""Prompts that one engine computes for another: how far, and as what request."""

from __future__ import annotations

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Request

# One token is drawn, so that numbers that are not finite are seen, and thrown away.
COMPUTED = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def handed_over_at(num_tokens: int, grain: int, *, limit: int | None = None) -> int:
    """Where the part of a prompt ends that is handed over: the last resume point with a token after it.

    The few tokens after it are computed again by who goes on, in one step with its other rows. So neither a ring nor a
    token has to go along, and what comes after is computed by one engine alone.

    Args:
        num_tokens: of the prompt. grain: the larger one of both engines.
        limit: the most tokens that may be skipped, for a request that wants numbers of its prompt.

    Example:
        >>> handed_over_at(100, 32), handed_over_at(96, 32), handed_over_at(20, 32)
        (96, 64, 0)
    """
    most = num_tokens - 1 if limit is None else min(limit, num_tokens - 1)
    return most // grain * grain


def prefix_request(
    request: Request, position: int, chunk: int, request_id: str | None = None
) -> Request:
    """What an engine that computes prompts is asked for, so that another one can go on at `position`.

    Args:
        request: that the other engine has.
        position: as `handed_over_at` gives it.
        chunk: tokens of a chunk of the prompt. Pages are handed over after each.
        request_id: of the new request; None for that of the other.
    """
    points = sorted({*range(chunk, position, chunk), position, *request.cache_breakpoints})
    return Request(
        request_id=request_id or request.request_id,
        prompt=request.tokens[: position + 1],
        params=COMPUTED,
        seed=0,
        max_tokens=1,
        cache_breakpoints=tuple(point for point in points if point <= position),
        reads_only=True,
    )


def comes_from_elsewhere(request: Request, grain: int) -> int:
    """How many tokens of a request another engine may compute for it; 0 for none.

    A request that wants numbers of its prompt computes what it wants numbers of.
    """
    return handed_over_at(len(request.tokens), grain, limit=request.first_read)
