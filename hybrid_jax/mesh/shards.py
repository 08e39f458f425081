"""Devices that a model is divided over: where its weights and its state lie, and programs that run on all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.layers.shards import AXIS
from hybrid_jax.mesh.split import Split, shard_config, splits
from hybrid_jax.state import State

EVERYWHERE = PartitionSpec()
T = TypeVar("T")


class Shards:
    """The devices of one model. Each runs `local`; arrays that differ are joined along one axis.

    What a device has of the state is joined along the last axis, whatever that is: there is one arena
    uint32[U, devices x W], of which each device sees uint32[U, W].

    Args:
        config: the whole model. devices: as many as it is divided over.

    Raises:
        ValueError: as `shard_config`.
    """

    def __init__(self, config: ModelConfig, devices: Sequence[jax.Device]) -> None:
        self.count = len(devices)
        self.local = shard_config(config, self.count)
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self._splits = splits(config, self.count)

    @functools.cached_property
    def everywhere(self) -> NamedSharding:
        """Where arrays lie that all devices have."""
        return NamedSharding(self.mesh, EVERYWHERE)

    @property
    def first(self) -> jax.Device:
        """The first device of this process."""
        return self.mesh.local_devices[0]

    def put_everywhere(self, tree: T) -> T:
        """Arrays of the host, on all devices. Every process has the same."""
        where = self.everywhere
        if where.is_fully_addressable:
            return jax.device_put(tree, where)
        # `jax.device_put` would have the processes compare them.
        return jax.tree.map(lambda leaf: _given(np.asarray(leaf), where), tree)

    @functools.cached_property
    def host_memory(self) -> NamedSharding | None:
        """Where programs put frames that go into the host's memory; None on a CPU, whose memory that is."""
        if self.first.platform == "cpu":
            return None
        return self.words.with_memory_kind("pinned_host")

    @property
    def words(self) -> NamedSharding:
        """How the words of a frame are divided."""
        return NamedSharding(self.mesh, along(0))

    # --- weights ----------------------------------------------------------------------------------

    def place(self, params: Any) -> Any:
        """Weights of the whole model, each divided over the devices. Those that are so already stay as they are."""
        return jax.tree.map(self._placed, self._splits, params, is_leaf=_is_split)

    def put(self, path: jax.tree_util.KeyPath, weight: np.ndarray) -> jax.Array:
        """One weight of the whole model, divided over the devices."""
        split = self._splits
        for step in path:
            split = split[step.key if isinstance(step, jax.tree_util.DictKey) else step.idx]
        return self._placed(split, weight)

    def _is_placed(self, weight: Any) -> bool:
        found = getattr(weight, "sharding", None)
        return isinstance(found, NamedSharding) and found.mesh == self.mesh

    def _placed(self, split: Split, weight: Any) -> jax.Array:
        if self._is_placed(weight):
            placed: jax.Array = weight
            return placed
        where = NamedSharding(self.mesh, along(split.axis))
        host, axis = np.asarray(weight), split.axis
        if axis is None:
            return self.put_everywhere(host)
        size = split.cut(host, 0).shape[axis]
        shape = (*host.shape[:axis], self.count * size, *host.shape[axis + 1 :])

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return split.cut(host, (index[axis].start or 0) // size)

        return jax.make_array_from_callback(shape, where, part)

    def whole(self, params: Any) -> Any:
        """Weights that `place` has divided, as one device would have them; each is put together when it is read.

        Those that are not divided stay as they are.
        """

        def whole(split: Split, weight: Any) -> Any:
            return Undivided(split, weight) if self._is_placed(weight) else weight

        return jax.tree.map(whole, self._splits, params, is_leaf=_is_split)

    @functools.cached_property
    def of_weights(self) -> Any:
        """How weights are divided, as `jax.shard_map` takes it."""
        return jax.tree.map(lambda split: along(split.axis), self._splits, is_leaf=_is_split)

    # --- the state --------------------------------------------------------------------------------

    def state(self, specs: State) -> State:
        """Zeros of a state whose specs are those of one device; see `state.make_state`."""

        def zeros(spec: ArraySpec, where: PartitionSpec) -> jax.Array:
            shape = spec.shape
            if where != EVERYWHERE:
                shape = (*shape[:-1], shape[-1] * self.count)
            return jnp.zeros(shape, spec.dtype, device=NamedSharding(self.mesh, where))

        state = jax.tree.map(zeros, specs, of_state(specs))
        stopped = self.put_everywhere(np.full(specs.tokens.shape, -1, np.int32))
        return state.replace(tokens=stopped)

    # --- programs ---------------------------------------------------------------------------------

    def over(self, function: Callable, arguments: tuple, results: Any) -> Callable:
        """A function that runs on all devices; arguments and results are divided as `jax.shard_map` takes it."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False
        )


class Placing:
    """Puts weights on devices one by one, as they are read.

    Args:
        devices: that will divide the model.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._known: dict[ModelConfig, Shards] = {}

    def __call__(
        self, config: ModelConfig, path: jax.tree_util.KeyPath, weight: np.ndarray
    ) -> jax.Array:
        """A weight of a model, by its path among the parameters."""
        if config not in self._known:
            self._known = {config: Shards(config, self._devices)}
        return self._known[config].put(path, weight)


class Undivided:
    """A weight that is divided over devices, as an array of NumPy once it is read.

    Attributes:
        shape, dtype: of the whole.
    """

    def __init__(self, split: Split, array: jax.Array) -> None:
        self._split, self._array, self.dtype = split, array, array.dtype
        self.shape = split.undivided_shape(array.shape)

    def sample(self, count: int) -> np.ndarray:
        """About `count` values spread over the whole array; no others are read."""
        size, axis = math.prod(self.shape), self._split.axis
        places = list(np.unravel_index(np.arange(0, size, max(1, size // count)), self.shape))
        if axis is not None:
            there = replace(self._split, axis=0).undivided(np.arange(self._array.shape[axis]))
            places[axis] = there[places[axis]]
        return np.asarray(self._array[tuple(places)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self._split.undivided(np.asarray(self._array))
        return whole if dtype is None else whole.astype(dtype)


def _given(array: np.ndarray, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, Split)


def along(axis: int | None) -> PartitionSpec:
    """Of an array that is divided along an axis, or the same on all devices."""
    return EVERYWHERE if axis is None else PartitionSpec(*[None] * axis, AXIS)


def joined(tree: Any) -> Any:
    """Arrays that differ between devices, joined along their last axes."""
    return jax.tree.map(lambda leaf: along(len(leaf.shape) - 1), tree, is_leaf=_has_shape)


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def of_state(state: State) -> State:
    """How a state is divided: its arena and its rings are."""
    whole = jax.tree.map(lambda leaf: EVERYWHERE, state, is_leaf=_has_shape)
    return whole.replace(arena=joined(state.arena), rings=joined(state.rings))
