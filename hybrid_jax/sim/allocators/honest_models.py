"""Models of honest pool studies: sizes by layer for the baselines, and the engine's own geometry for frames."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_jax.config import (
    Attention,
    EngineConfig,
    GatedDelta,
    LayerSpec,
    Mamba1,
    Mamba2,
    ModelConfig,
    RecurrentMixer,
)
from hybrid_jax.costs import state_elements
from hybrid_jax.geometry import Geometry, checkpoint_bytes, make_geometry, ring_specs
from hybrid_jax.sim.allocators.pool_geometry import ALIGNMENT, PAGE_TOKENS, PUBLISHED, PoolGeometry
from hybrid_jax.sim.model_specs import load_spec, names

DTYPE = "bfloat16"  # of KV and convolution columns; states are float32
MIN_PAGE_TOKENS = 16  # as on an accelerator
HEAD_DIM = 64  # of heads that stand for channels, in models whose recurrence has no heads


@dataclass(frozen=True, kw_only=True)
class HonestModel:
    """Sizes that allocators share a budget by.

    Attributes:
        layers: pages and states of single layers, convolution included.
        frames: the same state as the engine lays it out.
        window_bytes: of the convolution's columns in one row's ring, all layers.
        record_bytes: of one token's record there.
        raw_bytes: of a record that keeps what enters the convolution instead, so that it needs no columns.
    """

    layers: PoolGeometry
    frames: Geometry
    window_bytes: int
    record_bytes: int
    raw_bytes: int

    @property
    def name(self) -> str:
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
        """The same in frames."""
        return checkpoint_bytes(self.frames)

    @property
    def ring_bytes(self) -> int:
        """One row's ring."""
        return self.window_bytes + self.frames.grain * self.record_bytes

    def at_grain(self, grain: int) -> HonestModel:
        """The same with rings of so many tokens."""
        return replace(self, frames=replace(self.frames, grain=grain))


def honest_model(name: str) -> HonestModel:
    """A model of the published harness, in its sizes, or a named spec or .toml file.

    Raises:
        ValueError: no such model, or one that has not both kinds of memory.
    """
    if name in PUBLISHED:
        return _published(PUBLISHED[name])
    try:
        spec = load_spec(name)
    except ValueError as error:
        if name.endswith(".toml"):
            raise
        known = ", ".join([*PUBLISHED, *(n for n in names() if n not in PUBLISHED)])
        raise ValueError(
            f"pool-sim: no model {name!r}; known are {known}, or the path of a .toml file"
        ) from error
    attention = [block for block in spec.blocks if isinstance(block[1], Attention)]
    recurrent = [block for block in spec.blocks if isinstance(block[1], RecurrentMixer)]
    if len(attention) != 1 or len(recurrent) != 1:
        raise ValueError(
            f"pool-sim: {name}: needs one kind of attention and one of recurrent blocks, "
            f"got {len(attention)} and {len(recurrent)}"
        )
    (num_pages, page), (num_states, mixer) = attention[0], recurrent[0]
    state, columns = state_elements(mixer)
    taken = num_pages * _token_bytes(page), num_states * (4 * state + 2 * columns)
    if taken != (spec.costs.kv_bytes, spec.costs.checkpoint_bytes):
        raise ValueError(
            f"pool-sim: {name}: only KV and convolutions of 2 bytes and states of 4 have a geometry, got "
            f"{spec.costs.kv_bytes} bytes a token and {spec.costs.checkpoint_bytes} a state for {taken[0]} "
            f"and {taken[1]}"
        )
    layers = PoolGeometry(
        name=spec.name,
        page_tokens=PAGE_TOKENS,
        page_bytes=_align(PAGE_TOKENS * _token_bytes(page)),
        num_pages_each=num_pages,
        state_bytes=_align(4 * state + 2 * columns),
        num_states=num_states,
    )
    return _with_frames(layers, page, _as_heads(mixer), columns)


def _published(layers: PoolGeometry) -> HonestModel:
    """As published: states of 2 bytes an element, as many words of the engine's 4, and no convolution."""
    page = Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    state_size = layers.state_bytes // 4 // (HEAD_DIM * HEAD_DIM)
    mixer = Mamba2(num_heads=HEAD_DIM, head_dim=HEAD_DIM, state_size=state_size)
    return _with_frames(layers, page, mixer, 0)


def _with_frames(layers: PoolGeometry, page: Attention, mixer: Mamba2, columns: int) -> HonestModel:
    """Lets the engine choose its frames for layers of these shapes, with so many convolution columns each."""
    mixers = (page,) * layers.num_pages_each + (mixer,) * layers.num_states
    model = ModelConfig(
        family="sizes",
        vocab_size=1,
        width=1,
        layers=tuple(LayerSpec(mixers=(each,)) for each in mixers),
    )
    made = make_geometry(model, EngineConfig(dtype=DTYPE), min_page_tokens=MIN_PAGE_TOKENS)
    conv_words = -(-columns // 2)
    (group,) = made.groups
    column_frames = -(-layers.num_states * conv_words // made.frame_words)
    group = replace(group, column_words=conv_words, column_frames=column_frames)
    frames = replace(made, groups=(group,))
    (rings,) = ring_specs(frames, num_rows=1, window=1)
    sizes = {name: spec.num_bytes for name, spec in rings.items()}
    column = sizes["conv"] // rings["conv"].shape[2]
    record, steps = (sizes["xB"] + sizes["dt"]) // frames.grain, sizes["dt"] // frames.grain
    return HonestModel(
        layers=layers,
        frames=frames,
        window_bytes=sizes["conv"],
        record_bytes=record,
        raw_bytes=column + steps if columns else record,
    )


def _as_heads(mixer: RecurrentMixer) -> Mamba2:
    """The Mamba-2 mixer of the same state, the only kind that the engine's geometry knows."""
    if isinstance(mixer, GatedDelta):
        return Mamba2(
            num_heads=mixer.num_value_heads,
            head_dim=mixer.value_dim,
            state_size=mixer.key_dim,
            num_groups=mixer.num_key_heads,
        )
    if isinstance(mixer, Mamba1):
        heads = -(-mixer.inner_size // HEAD_DIM)
        return Mamba2(num_heads=heads, head_dim=HEAD_DIM, state_size=mixer.state_size)
    return mixer


def _token_bytes(attention: Attention) -> int:
    return 2 * 2 * attention.num_kv_heads * attention.head_dim


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
