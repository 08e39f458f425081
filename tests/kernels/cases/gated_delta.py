"""Named shapes for the tests and the benchmarks of the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class ScanCase:
    """One call of `gated_delta_scan`.

    Attributes:
        name: says what the shape is for.
        rows, tokens, heads, width, groups, size: B, T, M, P, G, R.
        lengths: valid tokens per row; None for all.
        state_lengths: tokens before the returned state; None for `lengths`.
        alike: 0 for keys in random directions, 1 for keys that are all the same.
        forget: exponents of the decays lie between -`forget` and 0.
    """

    name: str
    rows: int = 2
    tokens: int
    heads: int = 2
    width: int = 8
    groups: int = 1
    size: int = 16
    lengths: tuple[int, ...] | None = None
    state_lengths: tuple[int, ...] | None = None
    alike: float = 0.0
    forget: float = 0.5


SCANS = (
    ScanCase(name="one_token", tokens=1),
    ScanCase(name="two_tiles_and_a_bit", tokens=133, heads=6, groups=2),
    ScanCase(name="padding", rows=3, tokens=70, lengths=(70, 33, 0)),
    ScanCase(
        name="states_before_the_end",
        rows=4,
        tokens=96,
        lengths=(96, 95, 64, 40),
        state_lengths=(64, 64, 64, 32),
    ),
    ScanCase(name="odd_sizes", tokens=19, heads=6, groups=3, width=5, size=7),
    ScanCase(name="one_head_one_state", tokens=9, heads=1, width=1, size=1),
    ScanCase(name="keys_alike", tokens=70, alike=0.99, forget=0.0),
    ScanCase(name="forgetful", tokens=70, forget=40.0),
)


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """One call of `gated_delta_window_frames`.

    Attributes:
        name: says what the shape is for.
        slots: S, records the ring has room for. tokens: T, tokens of the window of each row.
        heads, width, groups, size: M, P, G, R.
        starts: ring slot of each row's first token; its length is the number of rows.
        known: tokens whose u the ring has; None for 0 everywhere.
        valid: tokens that are known or new; None for T everywhere.
    """

    name: str
    slots: int = 32
    tokens: int
    heads: int = 2
    width: int = 8
    groups: int = 1
    size: int = 16
    starts: tuple[int, ...]
    known: tuple[int, ...] | None = None
    valid: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.starts)


WINDOWS = (
    WindowCase(name="decode", tokens=1, starts=(0, 13, 31), heads=6, groups=2),
    WindowCase(name="decode_with_idle_rows", tokens=1, starts=(31, 5, 0), valid=(1, 0, 0)),
    WindowCase(name="verify", tokens=4, slots=35, starts=(0, 9, 31, 28), valid=(4, 2, 1, 4)),
    WindowCase(
        name="whole_ring",
        tokens=32,
        starts=(0, 0, 0, 0),
        known=(0, 20, 16, 0),
        valid=(32, 21, 17, 0),
        heads=6,
        groups=3,
        width=12,
        size=24,
    ),
    WindowCase(name="one_head_one_state", tokens=4, starts=(7,), heads=1, width=1, size=1),
)


def make_scan_inputs(case: ScanCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `gated_delta_scan`; q, k and v in `dtype`, the rest float32."""
    rng = np.random.default_rng(seed)
    lead = (case.rows, case.tokens)
    per_head = (*lead, case.heads)
    inputs = {
        "q": jnp.asarray(_normal(rng, *lead, case.groups, case.size), dtype),
        "k": jnp.asarray(_keys(rng, case.alike, *lead, case.groups, case.size), dtype),
        "v": jnp.asarray(_normal(rng, *per_head, case.width), dtype),
        "log_decay": jnp.asarray(-rng.uniform(0, case.forget, per_head), jnp.float32),
        "beta": jnp.asarray(rng.uniform(0, 1, per_head), jnp.float32),
        "initial_state": jnp.asarray(_normal(rng, case.rows, case.heads, case.width, case.size)),
    }
    for name in ("lengths", "state_lengths"):
        given = getattr(case, name)
        inputs[name] = None if given is None else jnp.asarray(given, jnp.int32)
    return inputs


def make_scan_frames_inputs(case: ScanCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `DeltaScanFrames`, with `state` in place of frames; keys and queries of any length."""
    rng = np.random.default_rng(seed)
    lead, heads = (case.rows, case.tokens), case.heads
    v, q = _normal(rng, *lead, heads * case.width), _normal(rng, *lead, case.groups * case.size)
    k = _keys(rng, case.alike, *lead, case.groups, case.size)
    k = 3 * k * rng.uniform(0.5, 1.5, (*lead, case.groups, 1)).astype(np.float32)
    all_tokens = (case.tokens,) * case.rows
    lengths = case.lengths or all_tokens
    return {
        "vkq": jnp.asarray(np.concatenate([v, k.reshape(q.shape), q], axis=-1), dtype),
        "dt": jnp.asarray(rng.uniform(0, 1, (*lead, heads)), jnp.float32),
        "A": jnp.asarray(-case.forget * np.linspace(0.5, 1, heads), jnp.float32),
        "projected": jnp.asarray(2 * _normal(rng, *lead, heads + 3), dtype),
        "state": jnp.asarray(_normal(rng, case.rows, heads, case.width, case.size)),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "state_lengths": jnp.asarray(case.state_lengths or lengths, jnp.int32),
    }


def make_window_inputs(case: WindowCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `DeltaWindow`, with `state` in place of frames; q, v, u and k in `dtype`, the rest float32.

    Every slot and every token holds plausible values, those that do not count included.
    """
    rng = np.random.default_rng(seed)
    rows, none = case.rows, (0,) * case.rows
    new, ring = (rows, case.tokens), (rows, case.slots)
    return {
        "state": jnp.asarray(_normal(rng, rows, case.heads, case.width, case.size)),
        "q": jnp.asarray(_normal(rng, *new, case.groups, case.size), dtype),
        "v": jnp.asarray(_normal(rng, *new, case.heads, case.width), dtype),
        "beta": jnp.asarray(rng.uniform(0, 1, (*new, case.heads)), jnp.float32),
        "u": jnp.asarray(_normal(rng, *ring, case.heads, case.width), dtype),
        "k": jnp.asarray(_keys(rng, 0.0, *ring, case.groups, case.size), dtype),
        "log_decay": jnp.asarray(-rng.uniform(0, 0.5, (*ring, case.heads)), jnp.float32),
        "starts": jnp.asarray(case.starts, jnp.int32),
        "num_known": jnp.asarray(case.known or none, jnp.int32),
        "num_valid": jnp.asarray(case.valid or (case.tokens,) * rows, jnp.int32),
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _keys(rng: np.random.Generator, alike: float, *shape: int) -> np.ndarray:
    """Keys of length 1, in random directions or `alike`."""
    common = rng.standard_normal(shape[-1:], np.float32)
    keys = (1 - alike) * rng.standard_normal(shape, np.float32) + alike * common
    return keys / np.sqrt(np.square(keys).sum(-1, keepdims=True))
