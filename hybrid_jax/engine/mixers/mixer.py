"""What a step asks of a kind of mixer, on either backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode, field

from hybrid_jax.config import EngineConfig, Mixer
from hybrid_jax.geometry import Geometry, KVPlace, StateGroup, StatePlace
from hybrid_jax.layers.cut import CutInput, MixerInput
from hybrid_jax.state import Model, State

# A kind takes specs of its own class alone, and keeps pages or a state.
Spec = TypeVar("Spec", bound=Mixer, contravariant=True)
Place = TypeVar("Place", bound=KVPlace | StatePlace, contravariant=True)


class WindowRows(NamedTuple):
    """Rows of a window: T tokens at absolute positions base .. base + T - 1. Those at [begin, end) are new.

    Attributes:
        tokens: int32[B, T]. base, begin, end: int32[B]; a row with begin = end = 0 is inert.
        checkpoint, slot: int32[B] position and slot of the row's checkpoint.
        table: int32[B, frames_per_page, pages].
        ancestors: int32[B, T] where the tokens branch like a tree: bit j of ancestors[b, t] is set if token t follows
            token j, or is token j. A token has a larger number than those it follows; several may follow the context
            directly. Token t lies at base + t, but stands at base + the number of tokens that it follows. At most 31
            tokens. None for a chain.
    """

    tokens: jax.Array
    base: jax.Array
    begin: jax.Array
    end: jax.Array
    checkpoint: jax.Array
    slot: jax.Array
    table: jax.Array
    ancestors: jax.Array | None = None

    @property
    def starts(self) -> jax.Array:
        """In the ring, where the records of the window begin, int32[B]."""
        return self.base - self.checkpoint

    @property
    def num_known(self) -> jax.Array:
        """How many of the window's first tokens are not new, int32[B]."""
        return jnp.maximum(self.begin - self.base, 0)

    @property
    def num_valid(self) -> jax.Array:
        """How many of the window's tokens exist, int32[B]."""
        return jnp.maximum(self.end - self.base, 0)

    @property
    def parents(self) -> jax.Array:
        """Where the tokens branch: for each one the number of the token that it follows; -1 for none. int32[B, T]."""
        assert self.ancestors is not None, "a chain has no branches"
        others = self.ancestors & ((1 << jnp.arange(self.ancestors.shape[1])) - 1)
        return 31 - jax.lax.clz(others)


class WindowPlan(NamedTuple):
    """What all layers of a window share.

    Attributes:
        rows: the rows of the window.
        valid: bool[B, T] tokens that are new and real.
        frames: int32[B, F] frames of the rows' checkpoints. exists: bool[B], false if the state is zero.
        shared: for each group, what its kind has made of the weights of all its layers (`StateSteps.prepare`).
        commits: all new tokens stay. Otherwise a call of `StateSteps.commit` says how many tokens of each row stay.
        aligned: the window begins at the checkpoint and is as long as the ring, as in exact mode.
        model: what the step is specialised on.
    """

    rows: WindowRows
    valid: jax.Array
    frames: jax.Array
    exists: jax.Array
    shared: tuple[Any, ...]
    commits: bool
    aligned: bool
    model: Model

    def with_table(self, table: jax.Array) -> WindowPlan:
        """The same with another page table."""
        return self._replace(rows=self.rows._replace(table=table))


class ChunkRows(NamedTuple):
    """Rows of a chunk: T tokens from absolute position `start` on. The first `length` of them exist.

    Attributes:
        tokens: int32[R, T]. start, length: int32[R].
        state_len: int32[R] how many tokens of the chunk the checkpoint after it covers.
        row: int32[R] ring rows.
        read, write: int32[R, F] frames of the checkpoints before and after.
        table: int32[R, frames_per_page, pages].
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    state_len: jax.Array
    row: jax.Array
    read: jax.Array
    write: jax.Array
    table: jax.Array


class ChunkPlan(NamedTuple):
    """What all layers of a chunk share: its rows, and what the step is specialised on."""

    rows: ChunkRows
    model: Model

    def with_table(self, table: jax.Array) -> ChunkPlan:
        """The same with another page table."""
        return self._replace(rows=self.rows._replace(table=table))


class Span(NamedTuple):
    """Where T tokens of B rows lie: token t of row b at position base[b] + t.

    Attributes:
        table: int32[B, frames_per_page, pages]. base: int32[B].
        begin, end: int32[B] positions [begin, end) are new and real.
        ancestors: as in `WindowRows`.
    """

    table: jax.Array
    base: jax.Array
    begin: jax.Array
    end: jax.Array
    ancestors: jax.Array | None = None


class CommitRows(NamedTuple):
    """What stays of the last window of B rows.

    Attributes:
        count: int32[B] how many of its tokens stay. Of an aligned window it is 0 until its last token stays, since its
            columns do not move before, and then all of them.
        path: int32[B, D] of a window whose tokens branch, the numbers of those that stay, in order and ascending; what
            comes after `count` means nothing. None: the first ones stay.
        base: int32[B] where the window begins. start: int32[B] the number of its first record.
    """

    count: jax.Array
    path: jax.Array | None = None
    base: jax.Array | None = None
    start: jax.Array | None = None

    def last_columns(self, history: int) -> jax.Array:
        """Which of the columns before and in the window come before the next one, int32[B, history]."""
        places = self.count[:, None] + jnp.arange(history)
        if self.path is None:
            return places
        within = jnp.clip(places - history, 0, self.path.shape[1] - 1)
        stays = jnp.take_along_axis(self.path, within, axis=1)
        return jnp.where(places < history, places, history + stays)

    def moves(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of the tokens after the first one: from where and to where in the window they move, and whether they do.

        Two int32 and a bool [B, D - 1]; a later move reads nothing that an earlier one has written.
        """
        assert self.path is not None, "commit: nothing moves in a chain"
        source = self.path[:, 1:]
        target = jnp.broadcast_to(jnp.arange(1, self.path.shape[1]), source.shape)
        return source, target, (target < self.count[:, None]) & (source != target)


class FoldRows(NamedTuple):
    """Rows whose ring may fold into a checkpoint.

    Attributes:
        needed: bool[B] rows whose ring holds exactly grain records.
        checkpoint: int32[B] position of the checkpoint that is read; 0 stands for the zero state.
        read_slot, write_slot: int32[B] slots of the old and the new checkpoint; they may be equal.
    """

    needed: jax.Array
    checkpoint: jax.Array
    read_slot: jax.Array
    write_slot: jax.Array

    def lengths(self, grain: int) -> jax.Array:
        """Records of each row that fold, int32[B]: `grain`, or -1 for rows that are left alone."""
        return jnp.where(self.needed, grain, -1).astype(jnp.int32)


class LoadRows(NamedTuple):
    """Rows whose window may begin at a checkpoint.

    Attributes:
        needed: bool[B] which of them do.
        frames: int32[B, F] frames of their checkpoints.
        exists: bool[B] false where there is none, and the columns are zero.
    """

    needed: jax.Array
    frames: jax.Array
    exists: jax.Array


class Entry(PyTreeNode):
    """Values to be written to one array of a ring.

    Attributes:
        values: [B, n, ...] the values of each row.
        start: int32[B] where in the array the first value goes; None for 0.
        renews: the values are computed from what the array held before.
    """

    values: jax.Array
    start: jax.Array | None = None
    renews: bool = field(pytree_node=False, default=False)


class Tail(NamedTuple):
    """What a layer's chunk leaves to be written at the end of the step.

    Attributes:
        rings: what goes to the rows' rings, by array.
        columns: bits[R, W - 1, E] columns of the checkpoint after the chunk.
        state: float32[R, units, unit_words] state of that checkpoint; None where there are only columns.
    """

    rings: dict[str, Entry]
    columns: jax.Array
    state: jax.Array | None


class Windowed(NamedTuple):
    """What one layer makes of a window.

    Attributes:
        out: outputs [B, T, D], or parts of them.
        state: the state.
        entries: what is to be written to the layer's ring at the end of the step, by array; empty if the layer has
            written its ring itself, or has none.
        awaited: whether writes at the end of the step wait until `out` exists. Those of layers beside it always do.
    """

    out: jax.Array
    state: State
    entries: dict[str, Entry] = {}  # noqa: RUF012  (nobody changes it)
    awaited: bool = True


class Chunked(NamedTuple):
    """What one layer makes of a chunk.

    Attributes:
        out: outputs [R, T, D], or parts of them. If the layer has no input of its own and only writes, they mean
            nothing.
        state: the state.
        tail: what the layer has not written itself; None if it has written all.
        stream: what layers that share its state need to read it (`LayerSteps.rescan`); None if there are none.
        awaited: whether writes of layers beside it wait until `out` exists: it is made of reads that come after the
            layer's own writes.
    """

    out: jax.Array
    state: State
    tail: Tail | None = None
    stream: Any = None
    awaited: bool = False


class LayerSteps(Protocol[Spec, Place]):
    """What a kind does in steps on one backend. All methods that take arrays are pure functions.

    A place says where the layer has what it keeps, or where the first layer of its group has it.
    """

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: Place,
        plan: WindowPlan,
        spec: Spec,
    ) -> Windowed:
        """One layer of a window."""

    def reread(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: Place,
        plan: WindowPlan,
        entries: dict[str, Entry],
        spec: Spec,
    ) -> Windowed:
        """One layer of a window that reads what its group shares.

        Args:
            entries: what the group's first layer has left to be written.
        """
        raise AssertionError(f"{type(self).__name__} has no form after a cut")

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: Place,
        plan: ChunkPlan,
        spec: Spec,
    ) -> Chunked:
        """One layer of a chunk."""

    def rescan(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: Place,
        plan: ChunkPlan,
        stream: Any,
        spec: Spec,
    ) -> jax.Array:
        """One layer of a chunk that reads what its group shares: outputs [R, T, D], or parts of them.

        Args:
            stream: from what the group's first layer has made (`Chunked`).
        """
        raise AssertionError(f"{type(self).__name__} has no form after a cut")

    def why_unsupported(self, spec: Spec, geometry: Geometry, engine: EngineConfig) -> str | None:
        """Why this backend cannot run such layers, or None."""
        return None


class PagedSteps(LayerSteps[Spec, KVPlace], Protocol[Spec]):
    """A layer writes the entries of new tokens to their pages, then reads all from pages. A kind says how."""

    def attend(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        span: Span,
        spec: Spec,
        model: Model,
    ) -> tuple[jax.Array, State]:
        """What a layer makes of tokens h [B, T, D]: out [B, T, D], or parts of it for a kernel to sum, and the state.

        Where a layer only writes, out means nothing.
        """

    def window(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        plan: WindowPlan,
        spec: Spec,
    ) -> Windowed:
        rows = plan.rows
        span = Span(rows.table, rows.base, rows.begin, rows.end, rows.ancestors)
        out, state = self.attend(params, h, state, at, span, spec, plan.model)
        # In exact mode its table waited for reads of the rings, and XLA may make it again when it is used.
        return Windowed(out, state, awaited=plan.aligned)

    def reread(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: KVPlace,
        plan: WindowPlan,
        entries: dict[str, Entry],
        spec: Spec,
    ) -> Windowed:
        return self.window(params, h, state, at, plan, spec)

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: State,
        at: KVPlace,
        plan: ChunkPlan,
        spec: Spec,
    ) -> Chunked:
        rows = plan.rows
        span = Span(rows.table, rows.start, rows.start, rows.start + rows.length)
        out, state = self.attend(params, h, state, at, span, spec, plan.model)
        return Chunked(out, state, awaited=True)

    def rescan(
        self,
        params: dict,
        h: CutInput,
        state: State,
        at: KVPlace,
        plan: ChunkPlan,
        stream: None,
        spec: Spec,
    ) -> jax.Array:
        return self.chunk(params, h, state, at, plan, spec).out


class StateSteps(LayerSteps[Spec, StatePlace], Protocol[Spec]):
    """What a kind with a state does besides, for all layers of a group at once."""

    def prepare(self, params: Sequence[dict]) -> Any:
        """Prepares what windows and folds need of the weights of a whole group, such as decay rates [L, ...]."""

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Lets some tokens of the last window stay, for all layers of a group."""

    def load(
        self, state: State, group: int, rows: LoadRows, model: Model
    ) -> tuple[State, list[jax.Array]]:
        """Puts the convolution columns of checkpoints into the rings of rows whose window begins at one.

        Returns:
            State, and arrays that exist only once the arena has been read.
        """

    def fold(self, state: State, group: int, rows: FoldRows, shared: Any, model: Model) -> State:
        """Folds the rings of all layers of a group into checkpoints; `shared` is what `prepare` has made of them."""

    def triton_unsupported(self, spec: Spec, geometry: Geometry) -> str | None:
        """Why no Triton kernel can scan prompts through such layers, or None."""
        return f"there is none for {type(spec).__name__}"

    def try_triton(self, group: StateGroup, geometry: Geometry) -> str | None:
        """Runs the Triton scan on the device; says what is wrong with its numbers, or None."""
        return None
