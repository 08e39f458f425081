"""How the arguments and the results of each program lie on the devices that a model is divided over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hybrid_jax.engine.steps.small import CHANGES
from hybrid_jax.mesh.shards import EVERYWHERE, Shards, along, joined, of_state
from hybrid_jax.state import State

# These change what is the same on all devices.
OF_ADJUST = ("write_adjust", "load_adjust", "move_adjust")
# Axes of the frames that these make.
AXES_OF_FRAMES = {"save_frames": 1, "narrow_checkpoint": 2, "widen_checkpoint": 2}
# After the state and the numbers of frames come these.
TAKE_FRAMES = ("load_frames", "write_checkpoint")


def over_devices(
    function: Callable, name: str, shards: Shards, *, is_step: bool, takes_weights: bool
) -> Callable:
    """A program as it runs on all devices.

    Args:
        function: what each device does. name: of the program.
        is_step: it returns the state, what adjusts logits, and what it makes for the host.
        takes_weights: these are its first argument.
    """

    def run(*args: Any) -> Any:
        specs = [of_state(arg) if isinstance(arg, State) else EVERYWHERE for arg in args]
        if takes_weights:
            specs[0] = shards.of_weights
        if name in TAKE_FRAMES:
            specs[2:] = map(joined, args[2:])
        if name == "write_row":
            specs[2] = _of_row(args[2])
        return shards.over(function, tuple(specs), _of_results(name, args, is_step))(*args)

    run.__name__ = name
    return run


def _of_results(name: str, args: tuple, is_step: bool) -> Any:
    state = next((arg for arg in args if isinstance(arg, State)), None)
    if is_step:
        assert state is not None, "a step changes the state"
        return of_state(state), EVERYWHERE, EVERYWHERE
    if name in AXES_OF_FRAMES:
        return along(AXES_OF_FRAMES[name] - 1)
    if name == "read_row":
        assert state is not None, "it reads the state"
        rings = jax.tree.map(lambda ring: along(ring.ndim - 2), state.rings)
        return {"rings": rings, **dict.fromkeys(("tokens", "lengths", "drafting"), EVERYWHERE)}
    if name in CHANGES and name not in OF_ADJUST:
        assert state is not None, "it changes the state"
        return of_state(state)
    return EVERYWHERE


def _of_row(held: dict[str, Any]) -> dict[str, Any]:
    """Of what `read_row` has read."""
    specs = dict.fromkeys(held, EVERYWHERE)
    return specs | ({"rings": joined(held["rings"])} if "rings" in held else {})
