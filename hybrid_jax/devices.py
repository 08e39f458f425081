"""The devices that models run on: what one has, and the cards whose sizes are known. No jax."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hybrid_jax.machine import nvidia_bytes, ram_bytes, widens_bfloat16

# Bytes that CUDA reports to a program as the whole of a card.
CARDS = {
    "a100": 84_980_000_000,  # 80 GB
    "a100-40gb": 42_290_000_000,
    "h100": 84_930_000_000,  # 80 GB
    "h200": 150_110_000_000,  # 141 GB
}
# Of a card, what jax is asked to take; the rest is for CUDA itself, for programs and their command buffers.
GPU_SHARE = 0.95
SHARE_VARIABLES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What runs a model.

    Attributes:
        platform: "cpu", "gpu", or what else jax calls it.
        num_bytes: memory that weights, arena and steps share; None where it is not known.
        total_bytes: all of a card's memory, where that is known to be more.
        name: of the card, if it is known.
        widens: its compiler makes float32 copies of bfloat16 weights in every step.

    Example:
        >>> card("h200").platform, card("h200").num_bytes // 10**9
        ('gpu', 142)
    """

    platform: str = "cpu"
    num_bytes: int | None = None
    total_bytes: int | None = None
    name: str | None = None
    widens: bool = False

    @property
    def is_host(self) -> bool:
        """Its memory is the host's, which Python, the compiler and the system share."""
        return self.platform == "cpu"

    @property
    def noun(self) -> str:
        """What messages call it: "this ... has"."""
        return "machine" if self.is_host else self.name or "device"


def host() -> Device:
    """This machine's CPU."""
    return Device(num_bytes=ram_bytes(), widens=widens_bfloat16())


def card(name: str) -> Device:
    """A card by its name, as `LLM` finds it when nothing else runs there; "cpu" is this machine's.

    Raises:
        ValueError: no such card is known.
    """
    key = name.lower()
    if key == "cpu":
        return host()
    if key not in CARDS:
        known = ", ".join(sorted(CARDS))
        raise ValueError(f"device must be cpu or one of the known cards, {known}; got {name!r}")
    return _gpu(CARDS[key], key)


def installed_gpu() -> Device:
    """The first NVIDIA GPU of this machine, as its driver describes it; of unknown size where that says nothing."""
    total = nvidia_bytes()
    return Device(platform="gpu") if total is None else _gpu(total, None)


def _gpu(total: int, name: str | None) -> Device:
    num_bytes = int(GPU_SHARE * total)
    return Device(platform="gpu", num_bytes=num_bytes, total_bytes=total, name=name)


def claim_gpu() -> None:
    """Asks jax for `GPU_SHARE` of a GPU in place of its own default of 0.75, unless the user has said something.

    It counts where jax has not looked at its devices yet.
    """
    if not any(os.environ.get(name) for name in SHARE_VARIABLES):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_SHARE)
