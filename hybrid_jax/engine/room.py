"""Whether a model fits a machine: its weights, its `memory`, and what the layers of one step hold. No jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations

from hybrid_jax.config import MLP, Attention, EngineConfig, Mamba2, ModelConfig, MoE
from hybrid_jax.config.engine import MAX_GRAIN
from hybrid_jax.costs import state_elements, weight_bytes, weight_count
from hybrid_jax.engine.sizing import Sizes, choose_sizes
from hybrid_jax.geometry import ITEM_BYTES, make_geometry
from hybrid_jax.machine import ram_bytes, widens_bfloat16
from hybrid_jax.sizes import format_size, parse_size, round_size

Change = dict[str, str | int]  # settings by name
# Advice leaves this much for Python, the compiler and its programs, or a twentieth of the memory if that is less.
HOST_BYTES = 1 << 30
# Of a row's keys and values attention works on so many tokens at a time, or on a page if that is longer.
TILE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory that weights, arena and steps share.

    Attributes:
        num_bytes: of a host, or what an accelerator has for this model.
        accelerator: it is one.
        widens: its compiler makes float32 copies of bfloat16 weights in every step.
    """

    num_bytes: int
    accelerator: bool = False
    widens: bool = False


def this_host() -> Machine | None:
    """The host, as a machine that runs a model on its CPU; None where the system does not say what it has."""
    ram = ram_bytes()
    return None if ram is None else Machine(num_bytes=ram, widens=widens_bfloat16())


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a model takes, and whether its machine has it.

    Attributes:
        model, engine, machine: what was asked; the machine is None where its memory is not known.
        weight_bytes: of all weights.
        weights_given: they are in memory already, in the dtype they have.
        temporary_bytes: of the largest step, an estimate.
        sizes: what `memory` is split into.
    """

    model: ModelConfig
    engine: EngineConfig
    machine: Machine | None
    weight_bytes: int
    weights_given: bool
    temporary_bytes: int
    sizes: Sizes

    @property
    def needed_bytes(self) -> int:
        """Everything together."""
        return self.weight_bytes + self.sizes.total_bytes + self.temporary_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the machine has what is needed; None where its memory is not known."""
        return None if self.machine is None else self.needed_bytes <= self.machine.num_bytes

    def parts(self) -> str:
        """What is needed as a sum: "weights 8 GiB (float32) + ... = 9 GiB"."""
        least = "at least " if self.fits is False and self.engine.memory is None else ""
        rows = f"{self.engine.max_rows} row" + ("s" if self.engine.max_rows > 1 else "")
        widens = self.machine is not None and self.machine.widens
        why = " (jax before 0.11 copies bfloat16 weights to float32)"
        copies = why if widens and self.engine.dtype == "bfloat16" else ""
        return (
            f"weights {format_size(self.weight_bytes)} ({self.engine.dtype}) + "
            f"memory {least}{format_size(self.sizes.total_bytes)} for {rows} + "
            f"temporaries {format_size(self.temporary_bytes)}{copies} = {format_size(self.needed_bytes)}"
        )

    @property
    def remedy(self) -> str:
        """What to do when it does not fit."""
        found = [_words(change, self) for change in _changes(self)]
        if found:
            return f"use {' or '.join(found)}"
        return f"use a smaller model or a machine with at least {round_size(self.needed_bytes, up=True)}"


class DoesNotFit(ValueError):
    """A model that needs more memory than the machine has."""


def find_room(
    model: ModelConfig,
    engine: EngineConfig,
    machine: Machine | None,
    *,
    held: int | None = None,
) -> Room:
    """Sizes everything; the default `memory` takes a part of what weights and steps leave.

    Args:
        model, engine, machine: what to size for.
        held: bytes of the weights if they are in memory already; None for those of `engine.dtype`.

    Raises:
        ValueError: as `choose_sizes`.
    """
    weights = weight_bytes(model, engine.dtype) if held is None else held
    temporaries = temporary_bytes(model, engine, widens=machine is not None and machine.widens)
    limit = None
    if machine is not None:
        left = machine.num_bytes - weights
        # Half, for the host also runs the system, Python and the compiler, and holds compiled programs.
        limit = max(0, min(left // 2, left - temporaries))
        if not machine.accelerator:
            limit = min(limit, machine.num_bytes // 4)
    geometry = make_geometry(model, engine)
    return Room(
        model=model,
        engine=engine,
        machine=machine,
        weight_bytes=weights,
        weights_given=held is not None,
        temporary_bytes=temporaries,
        sizes=choose_sizes(model, engine, geometry, default_limit=limit),
    )


def require_room(room: Room) -> None:
    """Refuses a model that its machine has not the memory for.

    Raises:
        DoesNotFit: with what it needs, what there is, and what would fit.
    """
    if room.fits is not False:
        return
    has = f"this {'device' if room.machine.accelerator else 'machine'} has"
    raise DoesNotFit(
        f"LLM: this model does not fit: {room.parts()}, and {has} "
        f"{format_size(room.machine.num_bytes)}; {room.remedy}"
    )


# --- what a step holds ----------------------------------------------------------------------------


def temporary_bytes(model: ModelConfig, engine: EngineConfig, *, widens: bool) -> int:
    """An estimate of what the layers of the largest step hold, logits left out: they are part of `memory`.

    One layer works at a time, in float32 arrays over the tokens of the step, and the states of the rows twice. In a
    decode step or an exact one, attention also copies the keys and values that it works on, of each row, twice.

    Args:
        model, engine: what runs.
        widens: as in `Machine`; such copies exist of all layers at once, but of one expert only.
    """
    blocks = [b for layer in model.layers for b in (*layer.mixers, layer.mlp) if b is not None]
    columns = 3 * model.width + max(_columns(block, model.width) for block in blocks)
    states = [state_elements(block)[0] for block in blocks if isinstance(block, Mamba2)]
    window = engine.grain if engine.exact else 1
    tile = max(TILE_TOKENS, make_geometry(model, engine).page_tokens)
    copied = [2 * b.num_kv_heads * b.head_dim * tile for b in blocks if isinstance(b, Attention)]
    decode = engine.max_rows * (window * columns + 2 * max(copied, default=0))
    count = max(decode, engine.prefill_tokens * columns)
    count += 2 * engine.max_rows * max(states, default=0)
    if widens and engine.dtype == "bfloat16":
        count += weight_count(_with_one_expert(model))
    return count * ITEM_BYTES["float32"]


def _columns(block: Attention | Mamba2 | MLP | MoE, width: int) -> int:
    """Elements a token that one block holds at a time."""
    if isinstance(block, Attention):
        return 3 * (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    if isinstance(block, Mamba2):
        # the projection and what becomes of it, and decay matrices of a tile
        return 5 * block.proj_size + 3 * MAX_GRAIN * block.num_heads
    if isinstance(block, MLP):
        return (3 if block.kind == "gated_silu" else 2) * block.width
    hidden = (3 if block.kind == "gated_silu" else 2) * block.width
    inner = block.latent_width or width
    return block.top_k * (hidden + 2 * inner) + 3 * block.shared_width


def _with_one_expert(model: ModelConfig) -> ModelConfig:
    """The model with a single expert in each mixture."""
    one = {"num_experts": 1, "top_k": 1, "num_groups": 1, "top_groups": 1}
    layers = (
        replace(layer, mlp=replace(layer.mlp, **one)) if isinstance(layer.mlp, MoE) else layer
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


# --- what would fit -------------------------------------------------------------------------------


def _changes(room: Room) -> list[Change]:
    """Changes of as few settings as possible after which the model fits; none where nothing helps."""
    for count in (1, 2, 3):
        tried = (
            _change(room, names) for names in combinations(("dtype", "memory", "max_rows"), count)
        )
        found = [change for change in tried if change is not None]
        if found:
            return found
    return []


def _change(room: Room, names: Iterable[str]) -> Change | None:
    """Values of these settings with which the model fits; None where no values do."""
    change: Change = {}
    if "dtype" in names:
        if room.engine.dtype != "float32" or room.weights_given:
            return None
        change["dtype"] = "bfloat16"
    lower = "memory" in names
    if lower and room.engine.memory is None:
        return None
    if "max_rows" in names:
        change["max_rows"] = largest(
            lambda rows: _fitting(room, change | {"max_rows": rows}, lower) is not None,
            room.engine.max_rows - 1,
        )
        if not change["max_rows"]:
            return None
    return _fitting(room, change, lower)


def _fitting(room: Room, change: Change, lower_memory: bool) -> Change | None:
    """The change if the model then fits, with the most `memory` that does if that is to be lowered."""
    held = room.weight_bytes if room.weights_given else None
    try:
        engine = replace(room.engine, **change)
        if lower_memory:
            least = find_room(room.model, replace(engine, memory=None), room.machine, held=held)
            beside = least.weight_bytes + least.temporary_bytes
            spare = min(HOST_BYTES, room.machine.num_bytes // 20)
            memory = round_size(max(1, room.machine.num_bytes - beside - spare), up=False)
            memory = memory.replace(" ", "")  # one word for a shell
            change = change | {"memory": memory}
            engine = replace(engine, memory=parse_size(memory))
        fits = find_room(room.model, engine, room.machine, held=held).fits
    except ValueError:  # this memory cannot hold one sequence
        return None
    return change if fits else None


def _words(change: Change, room: Room) -> str:
    """The change as keywords of `LLM`."""
    said = []
    for name, value in change.items():
        option = f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        if name == "dtype":
            weights = format_size(weight_bytes(room.model, value))
            said.append(f"{option} ({weights} of weights)")
        else:
            said.append(f"at most {option}")
    return " and ".join(said)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n <= limit with fits(n), 0 if none; fits(n) implies fits(n - 1)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
