"""The published harness's event loop, beside its definition and by hand; sizes of models and pools."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.pools.loads import PoolLoad
from benchmarks.pools.model_sizes import (
    PUBLISHED,
    parse_pool,
    published_sizes,
)
from benchmarks.pools.paper_mode import ARRIVAL, DEPARTURE, GROWTH, events, run_paper
from benchmarks.pools.published import FixedDual
from tests.sim.tiny import POOL as TINY

JAMBA = PUBLISHED["jamba_1_5_mini"]


def load(*requests):
    """Of (prompt, gen, arrival)."""
    prompt, gen, arrivals = np.array(requests, np.int64).T
    return PoolLoad(workload="own", seed=0, prompt_lens=prompt, gen_lens=gen, arrivals=arrivals)


def run(pool_bytes, *requests, share=0.5):
    memory = FixedDual(TINY, pool_bytes, share)
    return run_paper(load(*requests), memory, TINY, name="own", pool_bytes=pool_bytes)


def defined_events(requests, page_tokens):
    """As the rules read: growths of who has departed are skipped."""
    pages = lambda tokens: -(-tokens // page_tokens)
    found = []
    for number, (prompt, gen, arrival) in enumerate(requests):
        found += [(arrival, ARRIVAL, number), (arrival + prompt + gen, DEPARTURE, number)]
        for k in range(1, gen + 1):
            if pages(prompt + k) > pages(prompt + k - 1):
                found.append((arrival + prompt + k, GROWTH, number))
    departed, kept = set(), []
    for _, kind, number in sorted(found):
        if kind == DEPARTURE:
            departed.add(number)
        if not (kind == GROWTH and number in departed):
            kept.append((kind, number))
    return kept


@pytest.mark.parametrize("seed", range(20))
def test_events_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    requests = [tuple(map(int, rng.integers(1, 40, 3))) for _ in range(30)]
    assert events(load(*requests), TINY) == defined_events(requests, 4)


def test_within_a_tick_departures_come_first_and_arrivals_last():
    # 0 leaves at 9, where 1 begins a page and 2 arrives; the page that 0's last token would begin is never asked for.
    found = events(load((4, 5, 0), (4, 8, 4), (1, 1, 9)), TINY)
    assert found[3:6] == [(DEPARTURE, 0), (GROWTH, 1), (ARRIVAL, 2)]
    assert (
        sum(kind == GROWTH for kind, _ in found) == 3
    )  # 0 with its fifth token, 1 with its fifth and ninth


def test_a_request_that_fits_is_counted():
    found = run(
        1000, (5, 8, 0)
    )  # two pages in two layers, two states; a page more at 9 tokens, none at 13
    assert (found.requests, found.completed, found.intact, found.hollow) == (1, 1, 1, 0)
    assert found.allocate_calls == 2 + 2 + 2
    assert found.peak_bytes == 2 * 3 * 10 + 2 * 30
    assert found.oom_count == found.oom_requests == found.evictions == 0


def test_each_failed_call_counts_and_the_request_goes_on():
    # 15 pages and 5 states; 17 pages a call never fit, states do, nor does growth fail: 2 calls of 1.
    found = run(300, (68, 5, 0))
    assert (found.oom_count, found.oom_requests, found.completed) == (2, 1, 0)
    assert found.allocate_calls == 2 + 2 + 2 and found.peak_bytes == 2 * 30 + 2 * 10


def test_who_lost_memory_and_was_refused_nothing_is_completed_and_hollow():
    # 15 pages: 0 holds 8 of them until 1 asks for its second 4.
    found = run(300, (16, 4, 0), (16, 4, 1))
    assert (found.completed, found.hollow, found.intact) == (2, 1, 1)
    assert (found.evictions, found.victim_requests, found.pages_evicted) == (1, 1, 8)


def test_who_evicted_itself_is_hollow_as_well():
    # 6 pages: the second layer's 4 evict the first layer's.
    found = run(120, (16, 1, 0))
    assert (found.completed, found.hollow, found.self_evictions) == (1, 1, 1)


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_of_the_published_models():
    assert {name: (g.page_bytes, g.state_bytes) for name, g in PUBLISHED.items()} == {
        "jamba_1_5_mini": (65_536, 262_144),
        "mamba2_1b3": (65_536, 2_097_152),
    }
    for geometry in PUBLISHED.values():
        assert (geometry.page_tokens, geometry.num_pages_each, geometry.num_states) == (16, 4, 28)
    assert JAMBA.least_bytes == 4 * 65_536 + 28 * 262_144
    assert [JAMBA.num_pages(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]


def test_an_unknown_model_is_an_error_that_lists_the_known():
    message = "pool-sim: no model 'gpt_9' in paper mode; known are jamba_1_5_mini, mamba2_1b3"
    with pytest.raises(ValueError, match=f"^{message}$"):
        published_sizes("gpt_9")


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 1 << 32), ("1073741824", 1 << 30), ("1.5 GiB", 3 << 29), ("65536KB", 65_536_000)]
)  # fmt: skip
def test_pools_are_written_like_any_size(text, size):
    assert parse_pool(text, JAMBA) == size


@pytest.mark.parametrize("text", ["8 Gib", "-1GiB", "0", ""])
def test_what_is_no_size_is_no_pool(text):
    with pytest.raises(ValueError, match=r"^--pool: a size must look like 5GB") as error:
        parse_pool(text, JAMBA)
    assert str(error.value).endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1", "--pool must hold one request of jamba_1_5_mini, 7.25 MiB at least, got 1 B"),
        ("7MiB", "--pool must hold one request of jamba_1_5_mini, 7.25 MiB at least, got 7 MiB"),
        ("1073741825", "--pool must be a multiple of 65536 bytes, a KV page of jamba_1_5_mini, got 1073741825"),
        ("1GB", "--pool must be a multiple of 65536 bytes, a KV page of jamba_1_5_mini, got 1000000000"),
        ("1TiB", "--pool must be at most 4194304 KV pages of jamba_1_5_mini, 274877906944 bytes, got 1099511627776"),
    ],
)  # fmt: skip
def test_a_pool_that_makes_no_sense_is_an_error(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_pool(text, JAMBA)
