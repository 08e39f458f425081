"""Results of a dispatched plan: on their way, then as plain tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.schedule.plan import Plan, Tokens
from hybrid_jax.schedule.request import TokenLogprobs


@dataclass
class Pending:
    """Results of one plan that may still be computing; `read` waits for them.

    Attributes:
        plan: what was asked.
        prefill, forks, decode: device results of the dispatches, or None.
        prompt: what the prefill's hidden states say about the prompts, or None.
        exact: results lie at their ring rows in prefill and decode alike.
        joined: exact mode: ring rows whose decode step ran in the prefill's dispatch.
    """

    plan: Plan
    prefill: Sampled | None = None
    forks: Sampled | None = None
    decode: Sampled | None = None
    prompt: Sampled | None = None
    exact: bool = False
    joined: frozenset[int] = frozenset()

    def read(self) -> Tokens:
        """Blocks until the device is done and copies the tokens to the host."""
        results = (self.prefill, self.forks, self.decode, self.prompt)
        prefill, forks, decode, prompt = jax.device_get(results)
        out = Tokens(prefill=[], decode=[])
        for line, row in enumerate(self.plan.prefill):
            place = (row.row if self.exact else line,)
            out.prefill.append(int(prefill.tokens[place]))
            count = row.request.params.logprobs if row.samples else None
            out.prefill_logprobs.append(_entry(prefill, place, count))
            count = row.request.params.prompt_logprobs
            if prompt is not None and row.request.lacks_prompt_logprobs:
                known = min(len(row.tokens), len(row.request.prompt) - 1 - row.start)
                places = [(*place, offset) for offset in range(known)]
                out.prompt_logprobs[line] = [_entry(prompt, at, count) for at in places]
        for line, row in enumerate(self.plan.forks):
            out.forks.append(int(forks.tokens[line]))
            out.fork_logprobs.append(_entry(forks, (line,), row.request.params.logprobs))
        for row in self.plan.decode:
            if self.exact:
                sampled = prefill if row.row in self.joined else decode
                places = [(row.row,)]
            else:
                sampled, places = decode, [(step, row.row) for step in range(row.num_steps)]
            places = [place for place in places if sampled.tokens[place] >= 0]
            out.decode.append([int(sampled.tokens[place]) for place in places])
            count = row.request.params.logprobs
            entries = [_entry(sampled, place, count) for place in places]
            out.decode_logprobs.append(entries if count is not None else [])
        return out


def _entry(sampled: Sampled, place: tuple[int, ...], count: int | None) -> TokenLogprobs | None:
    """The log-probabilities at one place, with the `count` most likely; None for None."""
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
