"""A program that every process of a group runs: `test_hosts.py` starts several and compares what they print."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys

import jax

from hybrid_jax import LLM, SamplingParams
from tests.llms import engine_of
from tests.mesh.models import DIVIDED
from tests.mesh.running import GREEDY, PROMPTS, answers, make_on, tokens_of
from tests.tiny_models import redrawn

GIVEN = [{"prompt_token_ids": ids} for ids in PROMPTS]
SAMPLED = SamplingParams(n=2, max_tokens=12, temperature=0.9, top_k=20, seed=5, ignore_eos=True)
HEARTBEAT = 20  # seconds after which jax ends processes whose fellow says nothing
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def asked(llm):
    """What one may ask for, a stream that is left early included."""
    found = {"greedy": answers(llm), "again": answers(llm)}
    found["sampled"] = tokens_of(llm.generate(GIVEN, SAMPLED))
    stream = llm.stream(GIVEN, GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()
    llm.reset_prefix_cache()
    found["after"] = answers(llm, SHORT)
    found["scores"] = [one.token_logprobs for one in llm.score(GIVEN[:2], [[5, 6, 7]])]
    return found


def of_a_group(name):
    """Of all processes, as `asked`, and the counters of the first one alone."""
    with make_on(f"tp={jax.device_count()}", name) as llm:
        found = asked(llm)
        if jax.process_index() == 0:
            found["lookups"] = llm.stats()["cache_lookups"]
        return found


def alone(name):
    """Each process has a model of its own: on one device, and on all that it has."""
    with make_on(None, name) as one, make_on(f"tp={jax.local_device_count()}", name) as all_own:
        if jax.process_index() == 1:
            return {"one": answers(one), "all": answers(all_own)}
    return {}


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors(name):
    """What goes wrong where processes do not do the same, or ask for what is not there."""
    config, _ = DIVIDED[name]
    mesh, me = f"tp={jax.device_count()}", jax.process_index()
    found = {}
    for option, value in (("cache_dir", "kept"), ("host_memory", "1MiB")):
        found[option] = _error(lambda given={option: value}: make_on(mesh, name, **given))
    half = f"dp=2,tp={jax.device_count() // 2}"
    found["replicas"] = _error(lambda: make_on(half, name))
    found["settings"] = _error(lambda: make_on(mesh, name, max_rows=3 + me))
    other = lambda: LLM.from_params(config, redrawn(config, seed=me), quiet=True, mesh=mesh)
    found["weights"] = _error(other)
    with make_on(mesh, name) as llm:
        found["calls"] = _error(lambda: llm.generate(GIVEN[: 2 + me], SHORT))
        found["later"] = _error(lambda: llm.generate(GIVEN, SHORT))
    with make_on(mesh, name) as llm:
        scheduler = engine_of(llm._thread).scheduler
        plan = scheduler.plan
        if me == 1:  # a scheduler that does otherwise

            def later(tried=[]):  # noqa: B006
                made = plan()
                for row in made.prefill if made and not tried else ():
                    tried.append(row)
                    row.tokens = row.tokens[::-1]
                return made

            scheduler.plan = later
        found["plans"] = _error(lambda: llm.generate(GIVEN, SHORT))
    llm = make_on(mesh, name)
    if me == 1:
        llm.close()
        found["closed"] = "closed itself"
    else:
        found["closed"] = _error(lambda: llm.generate(GIVEN, SHORT))
    return found


def one_ends(name, *, sent):
    """The second process is ended, or stopped for ever, in the middle of a call."""
    with make_on(f"tp={jax.device_count()}", name) as llm:
        stream = llm.stream(GIVEN, GREEDY)
        next(stream)
        if jax.process_index() == 1:
            os.kill(os.getpid(), sent)
        return len(list(stream))


CASES = {
    "of_a_group": of_a_group,
    "alone": alone,
    "errors": errors,
    "one_is_killed": functools.partial(one_ends, sent=signal.SIGKILL),
    "one_is_stopped": functools.partial(one_ends, sent=signal.SIGSTOP),
}

if __name__ == "__main__":
    address, count, index, what, name = sys.argv[1:]
    jax.distributed.initialize(address, int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT)
    print(json.dumps(CASES[what](name)))
    sys.stdout.flush()
    os.sync()
