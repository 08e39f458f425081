"""The prefix cache in the engine, on the bundled model: what it saves, and what it costs where it saves nothing.

    python benchmarks/cache/cached_prompts.py [--rounds 7] [--cases shared,turns,...] [--json FILE]

Every side gets the same random prompts, in rounds that start with another side each. Medians over rounds.

- `shared`: 64 prompts of 1,536 common and 16 own tokens, 16 new tokens each, in one call; seconds over those without a
  cache.
- `turns`: 20 conversations, in turn. Every turn adds 64 tokens and 32 new ones to the history. Milliseconds to the
  first token by turn, and those of the longest histories over those of the second turn.
- `nothing`: 64 prompts of 512 tokens with nothing in common, 32 new tokens each: seconds over those without a cache.
- `documents`: 12 questions to each of 8 documents, shuffled, in a pool that holds two of them: seconds and computed
  prompt tokens in the order of their tree, over those in the order they came.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, quantiles, turns, write_json
from hybrid_jax import LLM, SamplingParams
from hybrid_jax.engine.engine import Engine

POLICIES = ("adaptive", "lru")
COUNT, COMMON, OWN, NEW = 64, 1536, 16, 16
CONVERSATIONS, TURNS, SAID, ANSWERED = 20, 20, 64, 32
DOCUMENTS, QUESTIONS, DOCUMENT = 8, 12, 1024
BYTES = 256  # token ids that are no special tokens
MEMORY = {"documents": "12MiB"}


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def make_llm(cache: str, memory: str = "256MiB") -> LLM:
    llm = LLM(cache=cache, memory=memory, max_rows=8, max_model_len=2560, quiet=True)
    llm.warmup()
    return llm


def seconds(llm: LLM, prompts: np.ndarray, new: int) -> float:
    """Of one call with an empty cache."""
    llm.reset_prefix_cache()
    start = perf_counter()
    llm.generate(list(prompts), greedy(new))
    return perf_counter() - start


def sides_over(sides: dict[str, list[float]], base: str) -> dict:
    """What each side took, and the base's over it in the same round."""
    return {
        name: {
            "seconds": quantiles(values),
            f"{base}_over_it": quantiles(list(np.divide(sides[base], values))),
        }
        for name, values in sides.items()
    }


def shared(rng: np.random.Generator, rounds: int) -> dict:
    def draw() -> np.ndarray:
        common = np.broadcast_to(rng.integers(BYTES, size=COMMON), (COUNT, COMMON))
        return np.concatenate((common, rng.integers(BYTES, size=(COUNT, OWN))), axis=1)

    llms = {name: make_llm(name) for name in (*POLICIES, "off")}
    sides = {name: lambda p, llm=llm: seconds(llm, p, NEW) for name, llm in llms.items()}
    return sides_over(turns(rounds, sides, draw), "off")


def nothing(rng: np.random.Generator, rounds: int) -> dict:
    llms = {name: make_llm(name) for name in (*POLICIES, "off")}
    sides = {name: lambda p, llm=llm: seconds(llm, p, 32) for name, llm in llms.items()}
    return sides_over(turns(rounds, sides, lambda: rng.integers(BYTES, size=(COUNT, 512))), "off")


def conversation_turns(rng: np.random.Generator, rounds: int) -> dict:
    """One round for every three that are asked for: each is 400 calls a side."""
    found: dict[str, dict] = {}
    llms = {name: make_llm(name) for name in (*POLICIES, "off")}
    times = {name: [[] for _ in range(TURNS)] for name in llms}
    for _ in range(max(1, rounds // 3)):
        for llm in llms.values():
            llm.reset_prefix_cache()
        histories = [[] for _ in range(CONVERSATIONS)]
        for turn in range(TURNS):
            for history in histories:
                history += rng.integers(BYTES, size=SAID).tolist()
                for name, llm in llms.items():
                    (output,) = llm.generate([history], greedy(ANSWERED))
                    taken = output.metrics.first_token_time - output.metrics.arrival_time
                    times[name][turn].append(1000 * taken)
                history += output.outputs[0].token_ids
    for name, by_turn in times.items():
        medians = [float(np.median(values)) for values in by_turn]
        found[name] = {
            "ms_by_turn": medians,
            "last_five_over_second": float(np.median(medians[-5:]) / medians[1]),
        }
    return found


@contextmanager
def in_order_of_arrival():
    """Prompts are computed as they come."""
    order = Engine.order
    Engine.order = lambda self, prompts: list(range(len(prompts)))
    try:
        yield
    finally:
        Engine.order = order


def documents(rng: np.random.Generator, rounds: int) -> dict:
    def draw() -> np.ndarray:
        texts = np.repeat(rng.integers(BYTES, size=(DOCUMENTS, DOCUMENT)), QUESTIONS, axis=0)
        prompts = np.concatenate((texts, rng.integers(BYTES, size=(len(texts), 48))), axis=1)
        return rng.permutation(prompts)

    def in_order_of_tree(prompts: np.ndarray, llm: LLM) -> float:
        before = llm.stats()["prefill_tokens"]
        taken = seconds(llm, prompts, NEW)
        computed[llm].append((llm.stats()["prefill_tokens"] - before) / prompts.size)
        return taken

    def as_they_come(prompts: np.ndarray, llm: LLM) -> float:
        with in_order_of_arrival():
            return in_order_of_tree(prompts, llm)

    found = {}
    for policy in POLICIES:
        llms = [make_llm(policy, MEMORY["documents"]) for _ in range(2)]
        computed = {llm: [] for llm in llms}
        sides = {
            "tree": lambda p, llm=llms[0]: in_order_of_tree(p, llm),
            "arrival": lambda p, llm=llms[1]: as_they_come(p, llm),
        }
        found[policy] = sides_over(turns(rounds, sides, draw), "arrival")
        for name, llm in zip(sides, llms, strict=True):
            found[policy][name]["share_of_prompts_computed"] = float(np.median(computed[llm]))
    return found


CASES: dict[str, Callable[[np.random.Generator, int], dict]] = {
    "shared": shared,
    "turns": conversation_turns,
    "nothing": nothing,
    "documents": documents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = header() | {"rounds": options.rounds}
    for name in options.cases.split(","):
        print(name, flush=True)
        report[name] = CASES[name](np.random.default_rng(0), options.rounds)
        for side, values in report[name].items():
            print(f"  {side}: {values}", flush=True)
        write_json(options.json, report)


if __name__ == "__main__":
    main()
