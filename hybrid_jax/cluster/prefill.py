"""Prompts that one engine computes for another: how far, and as what request."""

from __future__ import annotations

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Request

# One token is drawn, so that numbers that are not finite are seen, and thrown away.
COMPUTED = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def prefix_request(
    request: Request, position: int, chunk: int, request_id: str | None = None
) -> Request:
    """What an engine that computes prompts is asked for, so that another one can go on at `position`.

    Args:
        request: that the other engine has.
        position: as `comes_from_elsewhere` gives it.
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
    """How many tokens of a request another engine computes for it; 0 for none.

    They end at the last resume point with a token after it. The few tokens after it are computed again by who goes on,
    in one step with its other rows. So neither a ring nor a token has to go along, and what comes after is computed by
    one engine alone. A request that wants numbers of its prompt computes what it wants numbers of.

    Args:
        request: that the engine has which goes on.
        grain: the larger one of both engines.
    """
    most = len(request.tokens) - 1
    if request.first_read is not None:
        most = min(most, request.first_read)
    return most // grain * grain
