"""Figures 10 to 13: one load at a time, by prompt length, capacity, model and arrivals."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cache.figures.figure import Figure, Panel, Table, listed, ratio, said, win
from benchmarks.cache.figures.models import (
    COMPOSITIONS,
    STATE_SIZES,
    variant,
)
from benchmarks.cache.figures.published import (
    COMPOSITION,
    CONTENTION,
    SESSIONS,
    STATE_SIZE,
    TURNS,
    same_trace,
)
from benchmarks.cache.figures.runs import POLICIES, Place, Runs, Setup, Sweep
from benchmarks.cache.figures.sweep import SMART
from hybrid_jax.sim.prefix_cache.request_order import Result
from hybrid_jax.sim.prefix_cache.timing import CostModel

LONG = 7_000  # tokens; the paper's line between short and long


def papers(numbers: Mapping[str, Mapping], key) -> dict[str, float | None]:
    """{"paper sglang", ...} for one row, with Marconi's win over SGLang+."""
    found = {f"paper {policy}": values.get(key) for policy, values in numbers.items()}
    return found | {"paper win, %": win(found["paper marconi"], found["paper sglang"])}


def wins(rates: Mapping[str, float]) -> dict[str, float | None]:
    """What three ways to weigh FLOPs, and learning, hit more than sglang."""
    chosen = ("marconi", "alpha-code:1", "adaptive")
    return {f"{policy} win, %": win(rates[policy], rates["sglang"]) for policy in chosen}


def rate_panel(rows: list[dict], names: list[str], title: str, x_label: str) -> Panel:
    """Hit rates in groups of bars, the paper's behind ours."""
    labels = [*POLICIES, *(f"paper {p}" for p in POLICIES if f"paper {p}" in rows[0])]
    return Panel(
        kind="bars",
        title=title,
        x_label=x_label,
        y_label="token hit rate, %",
        x=names,
        series={label: [row[label] for row in rows] for label in labels},
    )


# --- Fig. 10 --------------------------------------------------------------------------------------


def _bin_rows(results: dict[str, Result]) -> list[dict]:
    """Mean hit rate of a bin's requests less sglang's, in points."""
    rows = []
    for index, base in enumerate(results["sglang"].length_bins):
        row = {"tokens from": base.tokens, "requests": base.requests}
        row["sglang, %"] = round(100 * base.mean_hit_rate, 2)
        for policy in SMART:
            other = results[policy].length_bins[index]
            row[policy] = round(100 * (other.mean_hit_rate - base.mean_hit_rate), 2)
        rows.append(row)
    return rows


def _time_rows(results: dict[str, Result]) -> list[dict]:
    base, rows = results["sglang"], []
    for policy, result in results.items():
        row = {"policy": policy, "hit rate, %": round(100 * result.token_hit_rate, 2)}
        row["FLOPs saved, %"] = round(100 * result.flops_saved_rate, 2)
        row["FLOPs more than sglang, %"] = win(result.flops_saved, base.flops_saved)
        for p in ("p5", "p50", "p95"):
            row[f"{p}, ms"] = round(1000 * result.ttft_s[p], 1)
            row[f"{p}, % more"] = win(result.ttft_s[p], base.ttft_s[p])
        rows.append(row | {"alpha": result.alpha})
    return rows


def _halves(bins: list[dict], policy: str) -> str:
    short = [row[policy] for row in bins if row["tokens from"] < LONG]
    long = [row[policy] for row in bins if row["tokens from"] >= LONG]
    parts = [f"{min(short):+.1f} at worst below {LONG:,}"] if short else []
    parts += [f"{max(long):+.1f} at best above"] if long else []
    return f"{policy} {' and '.join(parts)}"


def fig_10(runs: Runs, setup: Setup) -> Figure:
    """One agents' run by prompt length."""
    place = setup.lengths
    results = {policy: runs(place, policy) for policy in ("none", *POLICIES)}
    bins, times = _bin_rows(results), _time_rows(results)
    told = "; ".join(_halves(bins, policy) for policy in ("marconi", "alpha-code:1", "adaptive"))
    hits = ", ".join(f"{row['policy']} {said(row['hit rate, %'])} %" for row in times[2:])
    percentiles = [f"{p}, ms" for p in ("p5", "p50", "p95")]
    return Figure(
        name="10",
        title=f"Who gains, by prompt length ({place.load}; {place.gigabytes:g} GB)",
        paper="SGLang+ hits 16.4 %, Marconi 32.7 % (+99.4 %) and saves 90.3 % more FLOPs; prompts below 7,000 tokens "
        "lose up to 3.0 points, longer ones gain up to 25.5. TTFT: P5 +6.3 % (2.1 ms), P50 -13.4 % (74.2 ms), P95 "
        "-22.0 % (274.9 ms). An agents' load; its arrivals and capacity are not said.",
        ours=f"Hit rates: {hits}. Points against sglang: {told}.",
        differences="The paper's gain, its growth with length and its slower P5 appear with the published code's "
        "formula and alpha = 1 from the start; an alpha found by tuning comes too late here, and short prompts do "
        "not lose.",
        tables=[
            Table(title="Mean hit rate of a request less sglang's, points", rows=bins),
            Table(title=f"TTFT by {CostModel().describe()}", rows=times),
        ],
        panels=[
            Panel(
                kind="bars",
                title="hit rate less sglang's",
                x_label="prompt tokens from",
                y_label="points",
                x=[f"{row['tokens from'] // 1000}k" for row in bins],
                series={policy: [row[policy] for row in bins] for policy in SMART},
            ),
            Panel(
                kind="bars",
                title="time to the first token",
                x_label="",
                y_label="ms",
                x=["P5", "P50", "P95"],
                series={row["policy"]: [row[p] for p in percentiles] for row in times},
            ),
        ],
    )


# --- Fig. 11 --------------------------------------------------------------------------------------


def fig_11(runs: Runs, setup: Setup) -> Figure:
    """One agents' load by capacity."""
    rows = []
    for place in setup.contention.places():
        rates = runs.rates(place)
        row = {"GB": place.gigabytes} | rates | wins(rates) | papers(CONTENTION, place.gigabytes)
        rows.append(row | same_trace(place.load, place.gigabytes))
    told = told_wins(rows)
    sizes = [f"{row['GB']:g}" for row in rows]
    return Figure(
        name="11",
        title=f"Capacity ({setup.contention.loads[0]})",
        paper="With 60 / 80 / 100 / 120 / 140 GB Marconi hits 24.3 / 51.5 / 68.3 / 30.0 / 10.0 % more than SGLang+: "
        "most where the cache is neither far too small nor nearly large enough.",
        ours=f"More than sglang with {' / '.join(sizes)} GB: {'; '.join(told)}.",
        differences="The published SGLang+ miscounts what its evictions free (25.1 % with 100 GB on this trace, "
        "31.6 % when counted exactly). Tuned Marconi is LRU from 80 GB on, as its window outlasts the trace; with "
        "alpha fixed it gains most in the smallest cache here and loses in the largest.",
        tables=[
            Table(title="Token hit rates, %; `code` is the published simulator", rows=rows),
            Table(title="P95 TTFT, ms", rows=p95_rows(runs, setup.contention)),
        ],
        panels=[rate_panel(rows, sizes, "token hit rate by capacity", "GB")],
    )


def told_wins(rows: list[dict]) -> list[str]:
    """How much more than sglang some policies hit, a row after the other."""
    return [
        f"{policy} {listed((row[f'{policy} win, %'] for row in rows), ' %')}"
        for policy in ("marconi", "alpha-code:1", "adaptive")
    ]


def p95_rows(runs: Runs, sweep: Sweep) -> list[dict]:
    return [
        {"load": str(place.load), "GB": place.gigabytes}
        | {policy: runs.p95_ms(place, policy) for policy in ("none", *POLICIES)}
        for place in sweep.places()
    ]


# --- Fig. 12 --------------------------------------------------------------------------------------


def fig_12a(runs: Runs, setup: Setup) -> Figure:
    """Models with more and fewer SSM layers."""
    rows = []
    for ssm, attention in COMPOSITIONS:
        rates = runs.rates(setup.layers, variant(attention=attention, ssm=ssm))
        row = {"SSM": ssm, "attention": attention} | rates | wins(rates)
        row["marconi over vllm, x"] = ratio(rates["marconi"], rates["vllm"])
        paper = papers(COMPOSITION, (ssm, attention))
        paper["paper over vllm, x"] = ratio(paper["paper marconi"], paper["paper vllm"])
        rows.append(row | paper)
    over = listed((row["marconi over vllm, x"] for row in rows), "x")
    told = told_wins(rows)
    names = [f"{row['SSM']}:{row['attention']}" for row in rows]
    return Figure(
        name="12a",
        title=f"Layer composition ({setup.layers.load}; {setup.layers.gigabytes:g} GB)",
        paper="As attention : SSM goes from 1:2 over 1:4 to 1:8, Marconi's win grows from 13.5 over 66.6 to 260 % "
        "over vLLM+ and from 5.8 over 26.0 to 59.7 % over SGLang+; a pure Transformer makes all equal. Load and "
        "capacity are not said.",
        ours=f"SSM:attention {', '.join(names)}: marconi over vllm {over}; over sglang {'; '.join(told)}.",
        differences="The growth over vllm is the paper's. Over sglang tuned Marconi does not grow (its alpha comes "
        "too late), alpha-code:1 does little. A pure Transformer makes vllm, sglang and Marconi equal within a "
        "point; adaptive still hits twice as much, as KV of 36 layers leaves room for few sessions and it keeps "
        "those.",
        tables=[Table(title="Token hit rates, %", rows=rows)],
        panels=[
            rate_panel(rows, names, "token hit rate by layers", "SSM : attention layers"),
        ],
    )


def fig_12b(runs: Runs, setup: Setup) -> Figure:
    """Models with larger and smaller states."""
    rows = []
    for size in STATE_SIZES:
        rates = runs.rates(setup.layers, variant(attention=4, ssm=24, state_size=size))
        row = {"N": size} | rates | wins(rates)
        row["marconi over vllm, x"] = ratio(rates["marconi"], rates["vllm"])
        row["alpha-code:1 over vllm, x"] = ratio(rates["alpha-code:1"], rates["vllm"])
        paper = papers(STATE_SIZE, size)
        paper["paper over vllm, x"] = ratio(paper["paper marconi"], paper["paper vllm"])
        rows.append(row | paper)
    over = [
        f"{policy} {listed((row[f'{policy} over vllm, x'] for row in rows), 'x')}"
        for policy in ("marconi", "alpha-code:1")
    ]
    names = [str(row["N"]) for row in rows]
    return Figure(
        name="12b",
        title=f"State size ({setup.layers.load}; {setup.layers.gigabytes:g} GB)",
        paper="From N = 16 to 128 Marconi's hit rate over vLLM+'s grows from 5.7 to 35.4 times; SGLang+ stays within "
        "16.4 to 18.4 %. Load and capacity are not said.",
        ours=f"Over vllm for N = {' / '.join(names)}: {'; '.join(over)}.",
        differences="vllm loses with larger states, as in the paper, but less: what it hits here is mostly the prompt "
        "that all agents share, which it never loses. sglang and alpha-code:1 hit about what SGLang+ and Marconi do.",
        tables=[Table(title="Token hit rates, %", rows=rows)],
        panels=[rate_panel(rows, names, "token hit rate by state size", "N")],
    )


# --- Fig. 13 --------------------------------------------------------------------------------------


def _arrival_rows(runs: Runs, sweep: Sweep, numbers: Mapping, key: str) -> list[dict]:
    rows = []
    for place in sweep.places():
        rates, value = runs.rates(place), getattr(place.load, key)
        row = {"load": str(place.load), "GB": place.gigabytes} | rates | wins(rates)
        rows.append(row | papers(numbers, value))
    return rows


def _arrival_panel(rows: list[dict], places: list[Place], key: str, x_label: str) -> Panel:
    names = [f"{getattr(place.load, key):g}" for place in places]
    return rate_panel(rows, names, f"token hit rate by {x_label}", x_label)


def fig_13(runs: Runs, setup: Setup) -> Figure:
    """Agents that come faster, and that wait longer."""
    sessions = _arrival_rows(runs, setup.sessions, SESSIONS, "sps")
    turns = _arrival_rows(runs, setup.turns, TURNS, "art")
    told = [
        f"{policy} {listed((row[policy] for row in rows), ' %')}"
        for rows in (sessions, turns)
        for policy in ("sglang", "alpha-code:1", "adaptive")
    ]
    return Figure(
        name="13",
        title="Arrivals: sessions a second (a), seconds a turn (b)",
        paper="From 0.5 to 2 sessions a second Marconi falls from 48.7 to 43.0 %, SGLang+ from 35.2 to 26.4 % (100 "
        "GB, 7.5 s a turn); from 5 to 10 s a turn from 25.9 to 24.1 % and from 18.8 to 15.5 %: the win grows from "
        "1.4 to 1.6 times. The setting of the second is not said; another run of the authors at 100 GB and 5 "
        "sessions a second has 39.6 / 41.6 / 43.0 % and 26.1 / 25.1 / 25.6 %.",
        ours=f"a: {'; '.join(told[:3])}. b: {'; '.join(told[3:])}.",
        differences="sglang falls as in the paper with more sessions a second and hardly with the pause, as nearly "
        "all sessions run at once either way; tuned Marconi is LRU at 100 GB (see fig. 11), and alpha-code:1 rises "
        "with the pause as the authors' other run does. Other arrivals than the committed ones are its sessions "
        "moved in time.",
        tables=[
            Table(title="a: sessions a second, token hit rates, %", rows=sessions),
            Table(title="b: seconds a turn, token hit rates, %", rows=turns),
            Table(
                title="P95 TTFT, ms",
                rows=[*p95_rows(runs, setup.sessions), *p95_rows(runs, setup.turns)],
            ),
        ],
        panels=[
            _arrival_panel(sessions, setup.sessions.places(), "sps", "sessions a second"),
            _arrival_panel(turns, setup.turns.places(), "art", "seconds a turn"),
        ],
    )
