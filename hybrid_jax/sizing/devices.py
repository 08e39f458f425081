"""The devices that models run on, and the cards whose sizes are known. No jax."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hybrid_jax.config.other_names import nearest
from hybrid_jax.machine import has_nvidia, nvidia_gpu, ram_bytes, widens_bfloat16
from pallas_kernels.plan import H200, Chip

CARDS_FILE = Path(__file__).with_name("cards.toml")
# The share of a card that jax is asked to take. The rest is for CUDA itself, for programs and their command buffers.
GPU_SHARE = 0.95
JAX_SHARE = 0.75  # the share that jax takes by itself
LEAST_SHARE = 0.01
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Shared memory that one program may have, in bytes, by compute capability: NVIDIA's published sizes.
SHARED_BYTES = {
    "7.0": 98_304,
    "7.5": 65_536,
    **dict.fromkeys(("8.0", "8.7"), 166_912),
    **dict.fromkeys(("9.0", "10.0", "10.3", "11.0"), 232_448),
}
LEAST_SHARED_BYTES = 101_376  # of 8.6, 8.9, 12.0 and 12.1, and taken for what is not known
# Compute capabilities from which on kernels run, and convert FP8 numbers.
FIRST_WITH_KERNELS = (8, 0)
FIRST_WITH_FP8 = (8, 9)
# NVIDIA's names of what comes from a capability on, the newest first.
ARCHITECTURES = {
    (10, 0): "Blackwell",
    (9, 0): "Hopper",
    (8, 9): "Ada",
    (8, 0): "Ampere",
    (7, 5): "Turing",
    (7, 0): "Volta",
}
BRANDS = ("nvidia", "geforce", "tesla", "quadro")  # words that a card's name means the same without
# Names that do not say which card it is, and those of devices on which models do not run.
ANY_GPU = ("gpu", "cuda", "nvidia")
OTHER_MAKERS = re.compile(
    r"amd|apple|arc|gaudi|inferentia|instinct|intel|metal|mi\d|mps|m[1-9](pro|max|ultra)?$|npu|radeon|rocm|rx\d|tpu|trainium|xpu"
)
SHARE_VARIABLES = (*FRACTIONS, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What runs a model.

    Attributes:
        platform: "cpu", "gpu", or another name that jax uses.
        num_bytes: memory that weights, arena and steps share; None if it is not known.
        total_bytes: all memory of a card, if that is known to be more.
        name: of the card, if it is known.
        capability: of a GPU: NVIDIA's compute capability, such as "9.0", or another maker's name. None if not known.
        num_sms: multiprocessors of a GPU; None if not known.
        shared_bytes: shared memory that one program of a GPU may have; None for what its capability says.
        widens: its compiler makes float32 copies of bfloat16 weights in every step.

    Example:
        >>> card("h200").platform, card("h200").num_bytes // 10**9
        ('gpu', 142)
    """

    platform: str = "cpu"
    num_bytes: int | None = None
    total_bytes: int | None = None
    name: str | None = None
    capability: str | None = None
    num_sms: int | None = None
    shared_bytes: int | None = None
    widens: bool = False

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's, which Python, the compiler and the system share."""
        return self.platform == "cpu"

    @property
    def api(self) -> str:
        """What programs it: "cuda" or "rocm" for a GPU, else the platform."""
        if self.platform != "gpu":
            return self.platform
        return "rocm" if self.capability and not self.capability[0].isdigit() else "cuda"

    @property
    def runs_kernels(self) -> bool:
        """Whether Pallas kernels run on it: on an NVIDIA GPU of capability 8.0 (Ampere) or more, as far as is known."""
        if self.platform != "gpu" or self.capability is None:
            return self.platform == "gpu"
        version = self.version
        return version is not None and version >= FIRST_WITH_KERNELS

    @property
    def version(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability as numbers, such as (9, 0); None if the device has none that is known."""
        major, _, minor = (self.capability or "").partition(".")
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None

    @property
    def architecture(self) -> str | None:
        """NVIDIA's name for cards of its capability, such as "Hopper"; None if it has none that is known here."""
        version = self.version or (0, 0)
        return next((name for first, name in ARCHITECTURES.items() if version >= first), None)

    @property
    def chip(self) -> Chip:
        """What kernels are cut up for; an H200, as far as nothing is known."""
        shared = self.shared_bytes
        if shared is None and self.version is not None:
            shared = SHARED_BYTES.get(str(self.capability), LEAST_SHARED_BYTES)
        return Chip(
            num_sms=self.num_sms or H200.num_sms,
            shared_bytes=shared or H200.shared_bytes,
            capability=self.version or H200.capability,
        )

    @property
    def converts_fp8(self) -> bool:
        """Whether kernels can convert FP8 numbers on it, as far as is known."""
        return self.version is None or self.version >= FIRST_WITH_FP8

    @property
    def is_hopper(self) -> bool:
        """Whether it is known to be one of NVIDIA's Hopper cards."""
        return self.platform == "gpu" and (self.capability or "").startswith("9.")

    @property
    def noun(self) -> str:
        """The word for it in messages: "this ... has"."""
        return "machine" if self.is_host else self.name or "device"


def host() -> Device:
    """This machine's CPU."""
    return Device(num_bytes=ram_bytes(), widens=widens_bfloat16())


class Card(NamedTuple):
    """One of NVIDIA's cards.

    Attributes:
        num_bytes: the memory that CUDA reports to a program.
        capability: compute capability, such as "9.0".
        num_sms: multiprocessors.
        words: others that may stand beside its name.
    """

    num_bytes: int
    capability: str
    num_sms: int
    words: tuple[str, ...]


@functools.cache
def cards() -> dict[str, Card]:
    """The known cards by name."""
    found = tomllib.loads(CARDS_FILE.read_text(encoding="utf-8"))
    return {
        name: Card(
            num_bytes=card.get("bytes") or int(card["gib"] * 2**30),
            capability=card["capability"],
            num_sms=card["sms"],
            words=tuple(card["words"].split()),
        )
        for name, card in found.items()
    }


def card(name: str) -> Device:
    """A card by its name, as `LLM` finds it when nothing else runs there. "cpu" is this machine's own.

    Case, spaces, hyphens and underscores make no difference, and a name may be longer, as drivers write it.

    Raises:
        ValueError: the card is not known.

    Example:
        >>> card("RTX 4090").capability, card("NVIDIA A100-SXM4-80GB").name
        ('8.9', 'a100')
    """
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word]
    own = [word for word in words if word not in BRANDS]
    if own == ["cpu"]:
        return host()
    for key, known in cards().items():
        if "".join(word for word in own if word not in known.words) == _plain(key):
            return _gpu(
                known.num_bytes,
                GPU_SHARE,
                name=key,
                capability=known.capability,
                num_sms=known.num_sms,
            )
    _refuse_card(name, "".join(words), "".join(own))


def _plain(name: str) -> str:
    return name.replace("-", "")


def _refuse_card(name: str, whole: str, own: str) -> NoReturn:
    """Raises for the name of no known card.

    Args:
        whole: the name in small letters, as one word. own: the same without brands.
    """
    other = "for another NVIDIA GPU give device_memory='24GB', or what it has"
    if whole in ANY_GPU:
        raise ValueError(
            f"device: {name!r} does not say which; name a card, such as h100, or {other}"
        )
    if OTHER_MAKERS.match(whole):
        raise ValueError(
            f"device: models run on CPUs and NVIDIA GPUs only, got {name!r}; give cpu, or a card such as h100"
        )
    plain = {_plain(key): key for key in cards()}
    longer = [key for short, key in plain.items() if own and short.startswith(own)]
    shorter = [key for short, key in plain.items() if own.startswith(short)]
    near = nearest(own, plain)
    if meant := longer or ([plain[near]] if near else shorter):
        raise ValueError(
            f"device: {name!r} is not a known card; did you mean {' or '.join(meant)}? {other}"
        )
    raise ValueError(
        f"device must be cpu or one of the known cards, {', '.join(sorted(cards()))}; got {name!r}; {other}"
    )


def with_memory(device: Device | None, num_bytes: int, capability: str | None = None) -> Device:
    """The same device with so much memory; a GPU of which little else is known if there is none.

    Args:
        num_bytes: all memory of a card, or of a host.
        capability: of that other GPU, if it is known.
    """
    if device is not None and device.is_host:
        return replace(device, num_bytes=num_bytes, name="CPU")
    if device is None:
        return _gpu(num_bytes, GPU_SHARE, name="GPU", capability=capability)
    return replace(device, num_bytes=int(GPU_SHARE * num_bytes), total_bytes=num_bytes)


def installed_gpu() -> Device:
    """This machine's first NVIDIA GPU, as its driver describes it. Its size is unknown if the driver says nothing."""
    found = nvidia_gpu()
    if found is None:
        return Device(platform="gpu")
    return _gpu(found.total_bytes, _share(), capability=found.capability)


def _gpu(total: int, share: float, **known: Any) -> Device:
    return Device(platform="gpu", num_bytes=int(share * total), total_bytes=total, **known)


def claim_gpu() -> None:
    """Asks jax for `GPU_SHARE` of a GPU, less what other processes hold, unless the user has set a share.

    It has an effect only before jax has looked at its devices.
    """
    if not _is_said():
        os.environ[FRACTIONS[0]] = f"{_share():.3g}"


def _share() -> float:
    """The share of a GPU's memory that jax takes or is asked to take."""
    for name in FRACTIONS:
        with suppress(ValueError):
            return float(os.environ.get(name, ""))
    if _is_said():
        return JAX_SHARE
    found = nvidia_gpu() if has_nvidia() else None
    others = 0.0 if found is None else found.used_bytes / found.total_bytes
    return max(LEAST_SHARE, GPU_SHARE - others)


def _is_said() -> bool:
    return any(os.environ.get(name) for name in SHARE_VARIABLES)
