"""Bytes that a decoded token moves, by the length of the rings: arithmetic over real geometries, for `grain.py`."""

from __future__ import annotations

from benchmarks.pools.model_sizes import ModelSizes, model_sizes
from hybrid_jax.config import MoE
from hybrid_jax.sim.model_specs import load_spec

MODELS = (
    "nemotron_h_8b",
    "qwen3_next_80b",
    "bamba_9b",
    "granite_4_h_small",
    "paper_7b_float32",
)
LENGTHS = (64, 32, 16, 8, 4, 2, 1)
STANDARD = 32
ROWS, CONTEXT = 64, 2048  # of the whole step
MIB = 1 << 20
KINDS = ("engine", "fold in window", "raw, fold in window")


def split_state(model: ModelSizes) -> tuple[int, int]:
    """Bytes of a row's float32 states, and of the convolution's columns in its checkpoint."""
    (group,) = model.frames.groups
    columns = 4 * group.num_layers * group.column_words
    return model.state_bytes - columns, columns


def ring_traffic(model: ModelSizes, length: int, *, folds_in_window: bool, raw: bool) -> float:
    """Bytes read and written for the recurrent layers of one row, per decoded token, weights left out.

    Every step reads the state and the records so far, its own too, and writes one. A fold, every `length` tokens,
    reads state and records and writes the state; columns go with it.

    Args:
        model, length: sizes, and tokens of a ring.
        folds_in_window: the window that reads the state anyway writes it folded, so that it is not read again. The
            engine has a launch of its own for folds.
        raw: records are kept before the convolution, and the ring has no columns but the checkpoint's.
    """
    state, columns = split_state(model)
    record = model.raw_bytes if raw else model.record_bytes
    records = (
        (length + 1) / 2 * record + record + record
    )  # read by windows and by the fold; written
    kept = columns if raw else columns + model.column_bytes  # read, and written with a new one
    fold = state + columns if folds_in_window else 2 * (state + columns)
    return state + records + kept + fold / length


def overwriting_traffic(model: ModelSizes) -> int:
    """The same without rings: every token reads and writes the state."""
    return 2 * sum(split_state(model))


def other_bytes(name: str, model: ModelSizes) -> float | None:
    """A row's share of the weights, in bfloat16, and its KV; None where experts make that a matter of routing."""
    spec = load_spec(name)
    if any(isinstance(block, MoE) for _, block in spec.blocks):
        return None
    state, _ = split_state(model)
    weights = (
        spec.costs.flops_per_token - 6 * state / 4
    ) / 2  # but for the recurrence, 2 FLOPs each
    return 2 * weights / ROWS + CONTEXT * model.token_bytes


def rows() -> list[dict]:
    """One for each geometry and length, and with length 0 without rings. MiB of a row and decoded token; `over_32`:
    over rings of 32 as the engine has them; `step_over_32`: the same with weights and KV."""
    found = []
    for name in MODELS:
        model, other = model_sizes(name), other_bytes(name, model_sizes(name))
        base = ring_traffic(model, STANDARD, folds_in_window=False, raw=False)
        for length in LENGTHS:
            kinds = {
                "engine": ring_traffic(model, length, folds_in_window=False, raw=False),
                "fold in window": ring_traffic(model, length, folds_in_window=True, raw=False),
                "raw, fold in window": ring_traffic(model, length, folds_in_window=True, raw=True),
            }
            ring = model.at_grain(length).ring_bytes
            found += [_row(name, length, ring, kind, kinds[kind], base, other) for kind in KINDS]
        found.append(_row(name, 0, 0, "overwriting", overwriting_traffic(model), base, other))
    return found


def _row(name, length, ring, kind, moved, base, other) -> dict:
    return {
        "geometry": name,
        "tokens": length,
        "ring_mib": ring / MIB,
        "kind": kind,
        "mib": moved / MIB,
        "over_32": moved / base,
        "step_over_32": None if other is None else (moved + other) / (base + other),
    }


def markdown() -> str:
    """A line for each geometry and length: MiB over those of the engine's 32, and the whole step's."""
    lines = [
        "| geometry | tokens | ring MiB | MiB a token | engine | fold in window | raw, fold in window | engine, step "
        "| fold in window, step | raw, step |",
        "|" + " --- |" * 10,
    ]
    found = {(row["geometry"], row["tokens"], row["kind"]): row for row in rows()}
    for name in MODELS:
        for length in LENGTHS:
            kinds = [found[name, length, kind] for kind in KINDS]
            cells = [f"{row['over_32']:.3f}" for row in kinds]
            cells += [_step(row) for row in kinds]
            first = f"{name} | {length} | {kinds[0]['ring_mib']:.1f} | {kinds[0]['mib']:.1f}"
            lines.append(f"| {first} | {' | '.join(cells)} |")
        row = found[name, 0, "overwriting"]
        lines.append(
            f"| {name} | overwriting | 0 | {row['mib']:.1f} | {row['over_32']:.3f} | | | {_step(row)} | | |"
        )
    return "\n".join(lines)


def _step(row: dict) -> str:
    return "" if row["step_over_32"] is None else f"{row['step_over_32']:.3f}"
