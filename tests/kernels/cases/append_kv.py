"""Named shapes for the tests and the benchmark of append_kv."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_kv.heads import turns
from tests.kernels.cases.paged_attention import NewTokens


@dataclass(frozen=True, kw_only=True)
class Case(NewTokens):
    """One call of `append_kv`.

    Attributes:
        begin: positions from here to `end` are written; None for all from `base` on.
        rotated: channels that are rotated. normed: with norms of heads.
        parts: parts of the projection, 0 for a whole one. gate: heads that stand after the values.
        float32_norms: weights of the norms, whatever the dtype of the rest.
        frames_per_page, page_frame: frames of each page, and which of them the layer uses.
        unused: entries at the end of a page table that name the sink. shared: page 0 is one frame for all rows.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    begin: tuple[int, ...] | None = None
    head_dim: int = 16
    rotated: int = 16
    normed: bool = False
    parts: int = 0
    gate: int = 0
    float32_norms: bool = False
    pages: int = 4
    frames_per_page: int = 1
    page_frame: int = 0
    unused: int = 0
    shared: bool = False
    large: bool = False


CASES = (
    Case(name="decode", tokens=1, base=(0, 15, 16, 63)),
    Case(name="decode_in_parts", tokens=1, base=(0, 15, 47), parts=3),
    Case(name="decode_inert_rows", tokens=1, base=(3, 0, 17), begin=(3, 0, 0), end=(4, 0, 0)),
    Case(name="without_rotation", tokens=3, base=(14, 0), rotated=0),
    Case(name="a_quarter_rotated", tokens=5, base=(11, 30), head_dim=32, rotated=8, normed=True),
    Case(name="half_rotated", tokens=2, base=(7,), head_dim=24, rotated=12, heads=3, kv_heads=1),
    Case(name="heads_normed", tokens=5, base=(0, 11, 37), normed=True, parts=2),
    Case(
        name="gate_and_float32_norms",
        tokens=3,
        base=(14, 0),
        rotated=8,
        normed=True,
        float32_norms=True,
        gate=4,
    ),
    Case(
        name="a_frame_of_each_page",
        tokens=5,
        base=(12, 28),
        frames_per_page=3,
        page_frame=1,
        before=128,
        behind=12,
    ),
    Case(
        name="chunk",
        tokens=33,
        base=(0, 16),
        begin=(0, 20),
        end=(33, 31),
        heads=5,
        kv_heads=1,
        head_dim=10,
        rotated=10,
    ),
    Case(name="far_positions", tokens=2, base=(131_000, 99), page_tokens=4096, pages=32),
    Case(name="decode_inside_a_frame", tokens=1, base=(5, 31), before=24, behind=10),
    Case(name="decode_many_rows", tokens=1, base=tuple(range(66)), pages=5, head_dim=2, rotated=0),
    Case(name="one_page", tokens=5, base=(0, 11, 37), pages=3, rotated=0),
    Case(name="two_pages", tokens=5, base=(12, 15, 28), before=32, behind=4, rotated=0),
    Case(name="three_pages", tokens=32, base=(8, 31), rotated=0),
    Case(name="whole_pages", tokens=32, base=(0, 32), head_dim=6, rotated=0, before=7),
    Case(
        name="part_of_a_window",
        tokens=32,
        base=(0, 32, 16, 0, 32),
        begin=(7, 32, 47, 0, 0),
        end=(8, 49, 48, 0, 0),
        rotated=0,
        behind=5,
    ),
    Case(
        name="behind_a_shared_page",
        tokens=32,
        base=(0, 0),
        begin=(16, 20),
        end=(32, 21),
        rotated=0,
        shared=True,
    ),
    Case(name="page_longer_than_the_window", tokens=5, page_tokens=64, base=(60, 3), pages=2),
    Case(name="last_page_of_the_table", tokens=32, base=(40, 56), end=(64, 64), rotated=0),
    Case(name="short_table", tokens=32, base=(0, 16), end=(9, 32), pages=3, rotated=0, unused=1),
    Case(
        name="nemotron_h_8b_decode",
        tokens=1,
        base=tuple(range(0, 2048, 32)),
        heads=32,
        kv_heads=8,
        head_dim=128,
        rotated=128,
        parts=4,
        page_tokens=64,
        pages=33,
        large=True,
    ),
    Case(
        name="nemotron_h_8b_prefill",
        tokens=8192,
        base=(0,),
        heads=32,
        kv_heads=8,
        head_dim=128,
        rotated=128,
        page_tokens=64,
        pages=128,
        large=True,
    ),
    Case(
        name="qwen3_5_prefill",
        tokens=2048,
        base=(0, 64),
        heads=16,
        kv_heads=2,
        head_dim=256,
        rotated=64,
        normed=True,
        float32_norms=True,
        gate=16,
        page_tokens=64,
        pages=34,
        large=True,
    ),
)
SMALL_CASES = tuple(case for case in CASES if not case.large)


def shapes_of(case: Case, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of a case that hold numbers."""
    columns = (case.heads + 2 * case.kv_heads + case.gate) * case.head_dim
    lead = [case.parts] if case.parts else []
    words = case.before + case.layout(dtype).page_words + case.behind
    frames = 4 + case.rows * case.frames_per_page * case.pages
    shapes = {
        "qkv": ((*lead, case.rows, case.tokens, columns), "float32" if case.parts else dtype),
        "arena": ((frames, words), "uint32"),
    }
    if case.normed:
        norm = ((case.head_dim,), "float32" if case.float32_norms else dtype)
        shapes |= {"q_norm": norm, "k_norm": norm}
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def make_places(case: Case, seed: int = 0) -> dict[str, jax.Array]:
    """Where tokens stand and lie; frames lie in shuffled order, with spare ones between."""
    count = case.rows * case.frames_per_page * case.pages
    ids = np.random.default_rng(seed).permutation(np.arange(1, count + 4))[:count]
    table = ids.reshape(case.rows, case.frames_per_page, case.pages)
    table[..., case.pages - case.unused :] = 0
    if case.shared:
        table[..., 0] = table[0, :, 0]
    base = np.array(case.base, np.int32)
    places = {
        "table": jnp.asarray(table, jnp.int32),
        "base": jnp.asarray(base),
        "begin": jnp.asarray(base if case.begin is None else case.begin, jnp.int32),
        "end": jnp.asarray(case.lengths, jnp.int32),
    }
    if case.rotated:
        positions = places["base"][:, None] + jnp.arange(case.tokens)
        places["cos"], places["sin"] = turns(positions, jnp.asarray(frequencies(case)))
    return places


def frequencies(case: Case) -> np.ndarray:
    """float32[F] radians per position."""
    return (10_000.0 ** -(np.arange(0, case.rotated, 2) / case.rotated)).astype(np.float32)


def make_inputs(case: Case, dtype: str = "float32", *, seed: int = 0) -> dict:
    """Random arguments of `append_kv` for a case."""
    rng = np.random.default_rng(seed)

    def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if name == "arena":
            return jnp.asarray(rng.integers(0, 2**32, like.shape, np.uint32))
        normal = rng.standard_normal(like.shape, np.float32)
        return jnp.asarray(1 + 0.1 * normal if name.endswith("norm") else normal, like.dtype)

    drawn = {name: draw(name, like) for name, like in shapes_of(case, dtype).items()}
    return drawn | make_places(case, seed)
