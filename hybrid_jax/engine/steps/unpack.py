"""What several kinds of steps do with their results on the host."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.schedule.plan import DecodeRow, PrefillRow, Tokens
from hybrid_jax.schedule.request import TokenLogprobs


def logprobs_at(
    sampled: Sampled, place: tuple[int, ...], count: int | None
) -> TokenLogprobs | None:
    """The log-probabilities at one place, with the `count` most likely tokens; None if `count` is None."""
    found = sampled.logprobs
    if count is None:
        return None
    return TokenLogprobs(
        token_id=int(sampled.tokens[place]),
        logprob=float(found.chosen[place]),
        rank=int(found.rank[place]),
        top=tuple(
            (int(token), float(value))
            for token, value in zip(
                found.ids[place][:count], found.values[place][:count], strict=True
            )
        ),
    )


def put_prefill(
    row: PrefillRow, place: int, line: int, sampled: Sampled, prompt: Sampled | None, into: Tokens
) -> None:
    """Stores the results of a chunk: its token, and log-probabilities of the prompt if asked for.

    Args:
        place: index of the row in the plan. line: line of the results.
    """
    into.prefill[place] = int(sampled.tokens[line])
    count = row.request.params.logprobs if row.samples else None
    into.prefill_logprobs[place] = logprobs_at(sampled, (line,), count)
    if prompt is not None and row.request.lacks_prompt_logprobs:
        count = row.request.params.prompt_logprobs
        known = min(len(row.tokens), len(row.request.prompt) - 1 - row.start)
        entries = [logprobs_at(prompt, (line, offset), count) for offset in range(known)]
        into.prompt_logprobs[place] = entries


def put_decode(
    row: DecodeRow, place: int, at: Sequence[tuple[int, ...]], sampled: Sampled, into: Tokens
) -> None:
    """Stores the results of a row's steps, up to a stop; `at` holds their places in the results, in order."""
    at = [step for step in at if sampled.tokens[step] >= 0]
    into.decode[place] = [int(sampled.tokens[step]) for step in at]
    count = row.request.params.logprobs
    if count is not None:
        into.decode_logprobs[place] = [logprobs_at(sampled, step, count) for step in at]
