"""What needs no trace: memory of fine checkpointing, FLOPs per byte, FLOPs by kind of layer."""

from __future__ import annotations

from benchmarks.cache.figures.figure import Figure, Panel, Table, said
from benchmarks.cache.figures.models import (
    MAMBA_7B,
    PAPER_7B,
    STATE_SIZE,
    TRANSFORMER_7B,
    WIDTH,
    variant,
)
from benchmarks.cache.figures.published import BLOCKS_OF_16_GB, OVER_TRANSFORMER
from benchmarks.cache.figures.runs import GB, Runs, Setup
from hybrid_jax.costs import Costs

LENGTHS = (1_000, 2_000, 4_000, 6_000, 8_000, 10_000)
LONG = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
BLOCKS = (16, 32, 64, 128)
MODELS = {"Transformer": TRANSFORMER_7B, "Hybrid": PAPER_7B, "Mamba": MAMBA_7B}
LAYERS = {
    "attention": variant(attention=4, ssm=0, mlp=0),
    "SSM": variant(attention=0, ssm=24, mlp=0),
    "feed-forward": variant(attention=0, ssm=0, mlp=28),
}


def fine_bytes(costs: Costs, tokens: int, block: int) -> int:
    """KV of a sequence, and a checkpoint behind every block of it."""
    return tokens * costs.kv_bytes + -(-tokens // block) * costs.checkpoint_bytes


def fig_3b(runs: Runs, setup: Setup) -> Figure:
    """Memory of one sequence when every block keeps a state."""
    rows = []
    for tokens in LENGTHS:
        sizes = {f"blocks of {b}, GB": fine_bytes(PAPER_7B.costs, tokens, b) / GB for b in BLOCKS}
        sizes["one state, GB"] = fine_bytes(PAPER_7B.costs, tokens, tokens) / GB
        sizes["Transformer, GB"] = fine_bytes(TRANSFORMER_7B.costs, tokens, tokens) / GB
        row = {"tokens": tokens} | {name: round(size, 3) for name, size in sizes.items()}
        rows.append(row | {"paper, blocks of 16": BLOCKS_OF_16_GB if tokens == 10_000 else None})
    last = rows[-1]
    times = last["blocks of 16, GB"] / last["Transformer, GB"]
    series = [key for key in last if key.endswith("GB")]
    return Figure(
        name="3b",
        title="Memory of one sequence with a state after every block",
        paper=f"10,000 tokens in blocks of 16 take {BLOCKS_OF_16_GB} GB in a 7B hybrid, {OVER_TRANSFORMER} times a "
        "Transformer of its size.",
        ours=f"{last['blocks of 16, GB']:.1f} GB, {times:.1f} times the Transformer; one state alone makes it "
        f"{last['one state, GB']:.2f} GB.",
        differences="None: the formulas are the same; the Transformer has 32 attention and 32 feed-forward layers.",
        tables=[Table(title="Gigabytes of one sequence", rows=rows)],
        panels=[
            Panel(
                kind="lines",
                title="7B hybrid, a state after every block",
                x_label="tokens",
                y_label="GB",
                x=list(LENGTHS),
                series={key.removesuffix(", GB"): [row[key] for row in rows] for key in series},
            )
        ],
    )


def efficiency(costs: Costs, tokens: int) -> float:
    """FLOPs that a cached sequence spares, per byte that it takes."""
    return costs.flops(tokens) / costs.prefix_bytes(tokens)


def _by_length(title: str, series: dict[str, list]) -> Panel:
    """FLOPs per byte over the lengths of `LONG`, both axes in logarithms."""
    return Panel(
        kind="lines",
        title=title,
        x_label="tokens",
        y_label="FLOPs / byte",
        x=list(LONG),
        series=series,
        log_x=True,
        log_y=True,
    )


def fig_5(runs: Runs, setup: Setup) -> Figure:
    """FLOPs spared per byte by length, for three models of one size."""
    found = {name: [efficiency(spec.costs, n) for n in LONG] for name, spec in MODELS.items()}
    rows = [
        {"tokens": tokens} | {f"{name}, FLOPs per byte": round(found[name][i]) for name in MODELS}
        for i, tokens in enumerate(LONG)
    ]
    rise = {name: (values[-1] - values[1]) / (LONG[-1] - LONG[1]) for name, values in found.items()}
    return Figure(
        name="5",
        title="FLOP efficiency of 7B models by sequence length",
        paper="Curves without numbers: the more SSM layers a model has, the steeper its FLOPs per byte rise; a "
        "Transformer's hardly do.",
        ours="From 1,000 to 32,000 tokens every token more adds "
        + ", ".join(f"{slope:.1f} ({name})" for name, slope in rise.items())
        + " FLOPs per byte.",
        differences="None that can be seen, as the paper prints no values: the order is the paper's. In proportion to "
        "itself the hybrid rises less than the Transformer beyond 1,000 tokens, where KV is most of what it keeps.",
        tables=[Table(title="FLOPs spared per byte of KV and state", rows=rows)],
        panels=[_by_length("FLOPs per byte", found)],
    )


def fig_14(runs: Runs, setup: Setup) -> Figure:
    """Where the FLOPs of a prefill go."""
    parts = {name: [spec.costs.flops(n) for n in LONG] for name, spec in LAYERS.items()}
    whole = [PAPER_7B.costs.flops(n) for n in LONG]
    shares = {
        name: [100 * part / all_ for part, all_ in zip(values, whole, strict=True)]
        for name, values in parts.items()
    }
    rows = [
        {"tokens": tokens, "TFLOPs": round(whole[i] / 1e12, 2)}
        | {f"{name}, %": round(shares[name][i], 1) for name in LAYERS}
        for i, tokens in enumerate(LONG)
    ]
    first, last = rows[0]["attention, %"], rows[-1]["attention, %"]
    return Figure(
        name="14",
        title="FLOPs of the 7B hybrid by kind of layer",
        paper="Areas without numbers: attention takes less than SSM and feed-forward layers while sequences are short "
        "and a large part later, with 7.1 % of the layers.",
        ours=f"Attention takes {said(first)} % of the FLOPs at {LONG[0]:,} tokens and {said(last)} % at {LONG[-1]:,}.",
        differences="None that can be seen: the formulas are those of table 1, the paper prints no values.",
        tables=[Table(title="FLOPs of a prefill", rows=rows)],
        panels=[
            Panel(
                kind="areas",
                title="share of the FLOPs of a prefill",
                x_label="tokens",
                y_label="%",
                x=list(LONG),
                series=shares,
                log_x=True,
            )
        ],
    )


def _layer_rows(tokens: int) -> list[dict]:
    """Table 1 for one layer of each kind: its formulas, and what the model's costs say."""
    L, D, N = tokens, WIDTH, STATE_SIZE
    # Without the convolution's state, as in the table, which the costs have.
    convolution = 8 * (2 * D + 2 * N)
    formulas = {
        "attention": (8 * L * D**2 + 4 * L**2 * D, 4 * L * D, L + 2 * D),
        "feed-forward": (16 * L * D**2, 0, None),
        "SSM": (12 * L * D**2 + 16 * L * D * N + 10 * L, 2 * D * N, 200 * L),
    }
    one = {
        "attention": variant(attention=1, ssm=0, mlp=0),
        "feed-forward": variant(attention=0, ssm=0, mlp=1),
        "SSM": variant(attention=0, ssm=1, mlp=0),
    }
    rows = []
    for name, (flops, state, per_byte) in formulas.items():
        costs = one[name].costs
        taken = L * costs.kv_bytes + max(0, costs.checkpoint_bytes - convolution)
        rows.append(
            {
                "layer": name,
                "tokens": L,
                "GFLOPs": round(costs.flops(L) / 1e9, 3),
                "paper's formula, GFLOPs": round(flops / 1e9, 3),
                "bytes": taken,
                "paper's formula, bytes": state,
                "FLOPs per byte": round(costs.flops(L) / taken) if taken else None,
                "paper, FLOPs per byte": per_byte,
            }
        )
    return rows


def table_1(runs: Runs, setup: Setup) -> Figure:
    """FLOPs, bytes and FLOPs per byte of one layer of each kind."""
    rows = [row for tokens in (1_000, 8_000, 32_000) for row in _layer_rows(tokens)]
    curves = {
        name: [
            row["FLOPs per byte"] for n in LONG for row in _layer_rows(n) if row["layer"] == name
        ]
        for name in ("attention", "SSM")
    }
    worst = max(abs(r["GFLOPs"] / r["paper's formula, GFLOPs"] - 1) for r in rows)
    return Figure(
        name="table1",
        title="FLOPs and bytes by kind of layer (table 1)",
        paper="FLOPs 8LD^2 + 4L^2D (attention), 16LD^2 (feed-forward), 12LD^2 + 16LDN + 10L (SSM); bytes 4LD and 2DN; "
        "FLOPs per byte of the 7B model L + 8192 and 200 L.",
        ours=f"The same; FLOPs are off by {100 * worst:.2f} % at most.",
        differences="The last term of the SSM is 10LD here, as in the published code. The table leaves out the "
        "convolution's state, and so do these rows; every other figure counts it (6 %).",
        tables=[Table(title="One layer, D = 4096 and N = 128", rows=rows)],
        panels=[_by_length("FLOPs per byte of one layer", curves)],
    )
