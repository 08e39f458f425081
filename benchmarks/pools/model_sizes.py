"""What a study of allocators knows of a model: sizes of pages and states, layer by layer and in the engine's frames."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_jax.byte_sizes import at_least, parse_size
from hybrid_jax.config import Attention, EngineConfig
from hybrid_jax.geometry import Geometry, checkpoint_bytes, fit_geometry, ring_specs, token_words
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout
from hybrid_jax.kinds.table import entry_of, kind_of, recurrent_kind
from hybrid_jax.sim.model_specs import ModelSpec, load_spec, names

PAGE_TOKENS = 16
ALIGNMENT = 128
MOST_PAGES = 1 << 22  # each is a number in a list
DTYPE = "bfloat16"  # of KV and convolution columns; states are float32
MIN_PAGE_TOKENS = 16  # as on an accelerator
HEAD_DIM = 64  # channels of a head, for a recurrence without heads
CONV_COLUMNS = 3  # of the published models, in the rings alone

POOLS = Path(__file__).parent / "data" / "published_pools.json"


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of what single layers keep, as most allocators hand it out.

    Attributes:
        name: of the model.
        page_bytes: KV of `page_tokens` tokens in one of `num_pages_each` attention layers (or groups of them).
        state_bytes: of one of `num_states` recurrent layers, convolution included.
    """

    name: str
    page_tokens: int
    page_bytes: int
    num_pages_each: int
    state_bytes: int
    num_states: int

    @property
    def least_bytes(self) -> int:
        """Bytes of a request of one page."""
        return self.num_pages_each * self.page_bytes + self.num_states * self.state_bytes

    def num_pages(self, num_tokens: int) -> int:
        """Pages that one attention layer needs for so many tokens."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of one model, for allocators that share a budget between KV and states.

    Attributes:
        layers: pages and states of single layers.
        frames: the same state as the engine lays it out.
        column_bytes: bytes of a row's ring that do not depend on its length, such as the convolution's columns; of all
            layers.
        record_bytes: bytes of one token's record in the ring.
        raw_bytes: bytes of a record that keeps what enters the convolution instead, so that it needs no columns.
    """

    layers: LayerSizes
    frames: Geometry
    column_bytes: int
    record_bytes: int
    raw_bytes: int

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.layers.name

    @property
    def token_bytes(self) -> int:
        """KV of a token, all layers."""
        return self.layers.num_pages_each * self.layers.page_bytes // self.layers.page_tokens

    @property
    def state_bytes(self) -> int:
        """One request's state, all layers."""
        return self.layers.num_states * self.layers.state_bytes

    @property
    def slot_bytes(self) -> int:
        """One request's state in frames, padding included."""
        return checkpoint_bytes(self.frames)

    @property
    def ring_bytes(self) -> int:
        """One row's ring."""
        return self.column_bytes + self.frames.grain * self.record_bytes

    def at_grain(self, grain: int) -> ModelSizes:
        """The same with rings of so many tokens."""
        return replace(self, frames=replace(self.frames, grain=grain))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _published(name: str, *, inner_size: int, state_size: int) -> LayerSizes:
    """As the published harness has it: every layer on its own, states in two bytes, no convolution."""
    return LayerSizes(
        name=name,
        page_tokens=PAGE_TOKENS,
        page_bytes=_align(PAGE_TOKENS * 2 * 2 * 8 * 128),  # K and V in two bytes, 8 heads of 128
        num_pages_each=4,
        state_bytes=_align(2 * inner_size * state_size),
        num_states=28,
    )


# The second is made up: its states are larger, the rest is the first's.
PUBLISHED = {
    name: _published(name, **sizes) for name, sizes in json.loads(POOLS.read_text("utf-8")).items()
}


def published_sizes(name: str) -> LayerSizes:
    """A model of the published harness, by name."""
    if name not in PUBLISHED:
        raise ValueError(
            f"pool-sim: no model {name!r} in paper mode; known are {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def model_sizes(name: str) -> ModelSizes:
    """A model of the published harness, in its sizes, or a named spec or .toml file.

    Raises:
        ValueError: no such model, or one that has not both kinds of memory.
    """
    if name in PUBLISHED:
        return _published_model(PUBLISHED[name])
    try:
        spec = load_spec(name)
    except ValueError as error:
        if name.endswith(".toml"):
            raise
        raise ValueError(
            f"pool-sim: no model {name!r}; known are {', '.join(usable_names())}, or the path of a .toml file"
        ) from error
    attention, recurrent = _both_kinds(spec)
    if len(attention) != 1 or len(recurrent) != 1:
        raise ValueError(
            f"pool-sim: {name}: needs one kind of attention and one of recurrent blocks, "
            f"got {len(attention)} and {len(recurrent)}; give one of {', '.join(usable_names())}"
        )
    (num_pages, page), (num_states, mixer) = attention[0], recurrent[0]
    token, layout = 4 * token_words(entry_of(page), DTYPE), recurrent_kind(mixer).layout(mixer)
    state = 4 * layout.state_words + 2 * layout.columns * layout.channels
    taken = num_pages * token, num_states * state
    if taken != (spec.costs.kv_bytes, spec.costs.checkpoint_bytes):
        raise ValueError(
            f"pool-sim: {name}: only KV and convolutions of 2 bytes and states of 4 have a geometry, got "
            f"{spec.costs.kv_bytes} bytes a token and {spec.costs.checkpoint_bytes} a state for {taken[0]} "
            f"and {taken[1]}"
        )
    layers = LayerSizes(
        name=name if spec.name in PUBLISHED else spec.name,  # two models have that name
        page_tokens=PAGE_TOKENS,
        page_bytes=_align(PAGE_TOKENS * token),
        num_pages_each=num_pages,
        state_bytes=_align(state),
        num_states=num_states,
    )
    invented = layout.carries and layout.units > 0
    return _sizes(layers, token, layout, ring=_in_heads(layout) if invented else layout)


def usable_names() -> list[str]:
    """The models by name that have one kind of attention and one of recurrent blocks."""
    others = (name for name in names() if name not in PUBLISHED)
    return [*PUBLISHED, *(n for n in others if [1, 1] == [*map(len, _both_kinds(load_spec(n)))])]


def _both_kinds(spec: ModelSpec) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Its kinds of attention and of recurrent blocks, each with how many there are."""
    return (
        [(num, block) for num, block in spec.blocks if isinstance(block, Attention)],
        [(num, block) for num, block in spec.blocks if isinstance(kind_of(block), RecurrentKind)],
    )


def _published_model(layers: LayerSizes) -> ModelSizes:
    """As published: states of 2 bytes an element, as many words of the engine's 4, and no convolution."""
    channels = HEAD_DIM * HEAD_DIM
    plain = StateLayout(
        units=channels,
        unit_words=layers.state_bytes // 4 // channels,
        columns=CONV_COLUMNS,
        channels=channels,
        records=(),
    )
    ring = _in_heads(plain)
    token = layers.page_bytes // layers.page_tokens
    return _sizes(layers, token, replace(ring, columns=0), ring=ring)


def _in_heads(layout: StateLayout) -> StateLayout:
    """The same state in heads of HEAD_DIM channels, with records like those of the engine's kinds with heads: x, B and
    a step size for each head."""
    heads, columns = -(-layout.units // HEAD_DIM), layout.unit_words
    return StateLayout(
        units=heads,
        unit_words=HEAD_DIM * columns,
        columns=layout.columns,
        channels=heads * HEAD_DIM + 2 * columns,
        records=(("uk", heads * HEAD_DIM + columns, None), ("dt", heads, "float32")),
    )


def _sizes(
    layers: LayerSizes, token_bytes: int, layout: StateLayout, *, ring: StateLayout
) -> ModelSizes:
    """Lets the engine choose its frames.

    Args:
        layers: sizes as other allocators have them.
        token_bytes: K and V of a token in one layer.
        layout: what the checkpoint of a layer holds.
        ring: what its ring holds.
    """
    engine = EngineConfig(dtype=DTYPE)
    fit = lambda layouts: fit_geometry(
        [token_bytes // 4] * layers.num_pages_each, layouts, engine, min_page_tokens=MIN_PAGE_TOKENS
    )
    frames = fit([layout] * layers.num_states)
    (rings,) = ring_specs(fit([ring] * layers.num_states), num_rows=1, window=1)
    conv = rings["conv"]
    per_token = {name: rings[name].num_bytes // frames.grain for name, _, _ in ring.records}
    record = sum(per_token.values())
    floats = sum(per_token[name] for name, _, dtype in ring.records if dtype is not None)
    return ModelSizes(
        layers=layers,
        frames=frames,
        column_bytes=conv.num_bytes,
        record_bytes=record,
        raw_bytes=conv.num_bytes // conv.shape[2] + floats if layout.columns else record,
    )


def parse_pool(text: str, layers: LayerSizes) -> int:
    """Bytes of a pool, written as 4GiB or as a number of bytes.

    Raises:
        ValueError: it is no such size, holds no request, or is no multiple of a page.
    """
    pool_bytes = parse_size(text, name="--pool")
    page, least = layers.page_bytes, layers.least_bytes
    if pool_bytes < least:
        must = f"hold one request of {layers.name}, {at_least(least, pool_bytes)}"
    elif pool_bytes > MOST_PAGES * page:
        must = f"be at most {MOST_PAGES} KV pages of {layers.name}, {MOST_PAGES * page} bytes, got {pool_bytes}"
    elif pool_bytes % page:
        must = f"be a multiple of {page} bytes, a KV page of {layers.name}, got {pool_bytes}"
    else:
        return pool_bytes
    raise ValueError(f"--pool must {must}")
