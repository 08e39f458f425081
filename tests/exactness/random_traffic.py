"""Random requests for a bench."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.exactness.jobs import Job

ROOMS = (0.7, 1.0, 1.2, 2.2)


def random_jobs(prompt, longest: int, count: int, rng: np.random.Generator) -> list[Job]:
    """Jobs whose prompts leave one of two trunks somewhere, and fit the pool."""
    jobs = []
    for _ in range(count):
        shared = rng.choice((0, 0, 0, 32, 64, 65, 97, 128, rng.integers(130)))
        tokens = prompt(shared, seed=rng.integers(2))
        tokens += prompt(rng.integers(1, 40), seed=rng.integers(1000, 1010))
        tokens = tokens[: longest - 1]
        jobs.append(
            Job(
                prompt=tokens,
                max_tokens=min(int(rng.choice((1, 40, 120, 160))), longest - len(tokens)),
                temperature=float(rng.choice((0.0, 0.8))),
                top_k=int(rng.choice((0, 20))),
                top_p=0.9,
                seed=int(rng.integers(5)),
                sample_index=int(rng.integers(3)),
                prompt_logprobs=1 if rng.random() < 0.1 else None,
                repetition_penalty=float(rng.choice((1.0, 1.0, 1.0, 1.2))),
                frequency_penalty=float(rng.choice((0.0, 0.0, 0.0, 0.5))),
                stop_ids=frozenset(range(rng.choice((0, 0, 0, 2)))),
                arrive=int(rng.integers(20)),
                abort_at=int(rng.integers(1, 60)) if rng.random() < 0.2 else None,
            )
        )
        if rng.random() < 0.3:
            first = jobs[-1] = replace(jobs[-1], group=f"g{len(jobs)}")
            later = int(rng.choice((0, 0, 3)))
            jobs += [
                replace(first, sample_index=i, arrive=first.arrive + later, abort_at=None)
                for i in range(3, 3 + rng.integers(1, 4))
            ]
    return jobs
