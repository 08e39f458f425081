"""Random traffic for the engine's loop around a simulated device."""

import random
from random import Random

from tests.schedule.simulated_engine import tokens_of


def random_traffic(
    seed,
    engine,
    *,
    turns=120,
    abort_rate=0.03,
    crash_rate=0.0,
    num_prefixes=4,
    longest=220,
    arrivals=0.4,
    stop=None,
):
    """Prompts that share prefixes in a tree-like way, arriving and aborting at random."""
    rng = random.Random(seed)
    pool = [tokens_of(rng, rng.randint(20, longest // 2)) for _ in range(num_prefixes)]
    for _ in range(turns):
        while rng.random() < arrivals:
            base = rng.choice(pool)
            prompt = base[: rng.randint(1, len(base))] if rng.random() < 0.4 else list(base)
            prompt = (prompt + tokens_of(rng, rng.choice([0, 1, 5, 40, 90])))[:longest]
            options = {
                "max_tokens": rng.choice([1, 2, 8, 30, 100, 120]),
                "stop_ids": rng.choice([(), (0,), (0, 1, 2)]),
                "stop": stop,
            }
            request = engine.add_siblings(rng.choice([1, 1, 1, 1, 1, 2, 4]), prompt, **options)[0]
            if rng.random() < 0.3:
                pool.append(request.prompt)
        if rng.random() < abort_rate and engine.scheduler._sequences:
            engine.scheduler.abort(rng.choice(list(engine.scheduler._sequences)))
            engine.scheduler.check_invariants()
        if rng.random() < crash_rate:
            engine.crash()
        engine.step()
        for request in engine.requests.values():  # a conversation goes on
            if request.output.finish_reason and rng.random() < 0.02:
                pool.append((request.prompt + request.output.token_ids)[:longest])
    engine.run()
    engine.check()


def serve(engine, seed):
    """Conversations that come back when the arena has long given their beginnings away."""
    rng = Random(seed)
    system = tokens_of(rng, 70)
    prompts = [system + tokens_of(rng, rng.randrange(60, 200)) for _ in range(8)]
    for _ in range(3):
        rng.shuffle(prompts)
        for place, prompt in enumerate(prompts):
            request = engine.add(prompt, max_tokens=rng.randrange(5, 50))
            if place % 2:
                engine.run()
                engine.scheduler.memory.tree.check_invariants()
            prompts[place] = prompt + request.output.token_ids[:3] + tokens_of(rng, 10)
        engine.run()
    hits = engine.counters["cache_hit_tokens"]
    engine.check()
    return hits
