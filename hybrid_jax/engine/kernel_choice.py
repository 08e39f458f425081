"""Which kernels an engine uses. This is chosen once, by its settings, its device, and a trial of the Triton kernels."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import PALLAS, XLA, Backend, EngineConfig, ModelConfig
from hybrid_jax.engine.mixers.table import LAYER_STEPS, group_steps
from hybrid_jax.engine.pack import MAX_STOP_IDS
from hybrid_jax.engine.programs.compile_cache import kept_beside
from hybrid_jax.engine.programs.store import PASSED, ProgramStore
from hybrid_jax.engine.trial_errors import fault_of
from hybrid_jax.geometry import Geometry, StateGroup
from hybrid_jax.products.cpu import calls
from hybrid_jax.products.cpu.start import own_products
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import backend_on, left_to_xla
from pallas_kernels import jax_triton
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rmsnorm.kernel import residual_unsupported
from pallas_kernels.token_sampling import SamplingArrays, sample_tokens

LOG = logging.getLogger("hybrid_jax.kernels")
WITHOUT_TRITON = " without them: pip uninstall jax-triton"
# Rows of the trial of sampling: temperature, top_k, top_p and min_p. Top-p keeps many tokens or few.
SETTINGS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (0.3, 0, 0.5, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What an engine's steps are made of, and why not of other kernels.

    Attributes:
        backend: what they are made of.
        left_to_xla: operations that XLA does although kernels do the rest, and why.
        not_triton: why Triton kernels are not used, by operation. It leaves out operations for which they are used, and
            operations that the engine does not need.
        products: which products of few rows serve on a CPU, in words; "" where there is no choice.
    """

    backend: Backend
    not_triton: dict[str, str]
    left_to_xla: dict[str, str] = field(default_factory=dict)
    products: str = ""


def choose_kernels(
    config: ModelConfig,
    geometry: Geometry,
    engine: EngineConfig,
    device: Device,
    *,
    place: jax.Device | None = None,
    store: ProgramStore | None = None,
) -> Kernels:
    """Chooses the kernels for a model's engine on a device. Triton kernels are tried out there first.

    Args:
        device: what runs the engine. place: that device as jax knows it, for trials; None for jax's default.
        store: remembers which trials were passed, or None.

    Raises:
        NotImplementedError: `EngineConfig.kernels` is "pallas", and these kernels cannot run the model; or as
            `backend_on`.
        RuntimeError: a trial left the device unusable, or found too little memory.
    """
    unsupported = why_unsupported(config, geometry, engine)
    backend = choose_backend(config, engine, device, unsupported)
    trials = Trials(place, store)
    ask = {"sampling": lambda: trials.of_sampling(config.vocab_size)}
    if config.recurrent and not engine.exact:  # exact mode takes prompts by windows
        ask["scan"] = lambda: _first(trials.of_scan(group, geometry) for group in geometry.groups)
    backend, products = with_own_products(backend, engine, device)
    left = left_to_xla(config, engine, backend)
    if engine.kernels == "auto" and device.runs_kernels and unsupported is not None:
        left = {"all operations": unsupported}
    none = _why_no_triton(backend, device)
    reasons = {name: none or reason() for name, reason in ask.items()}
    triton = {name for name, reason in reasons.items() if reason is None}
    return Kernels(
        backend=replace(
            backend,
            scan="triton" if "scan" in triton else backend.scan,
            sampling="triton" if "sampling" in triton else backend.sampling,
        ),
        not_triton={name: reason for name, reason in reasons.items() if reason is not None},
        left_to_xla=left,
        products=products,
    )


def with_own_products(
    backend: Backend, engine: EngineConfig, device: Device
) -> tuple[Backend, str]:
    """A backend that multiplies few rows by our own code where it runs on a CPU, and says so.

    The code is made at the first start on a machine, and tried in another process. XLA's products serve if that cannot
    be, if `EngineConfig.kernels` asks for them, and in a model on several devices.
    """
    if engine.kernels != "auto" or device.platform != "cpu":
        return backend, ""
    if engine.tp > 1:
        return backend, "XLA's, for any number of rows: the model is divided over several devices"
    own = own_products(kept_beside("products"))
    if not own.version:
        return backend, own.about
    return replace(backend, products=calls.__name__, version=own.version), own.about


def choose_backend(
    config: ModelConfig, engine: EngineConfig, device: Device, unsupported: str | None
) -> Backend:
    """What `EngineConfig.kernels` means: "auto" is "pallas" if device and model allow it, else "xla".

    Args:
        unsupported: why the kernels cannot run the model's layers, or None.

    Raises:
        NotImplementedError: "pallas" is asked for, but these kernels cannot run the model; or as `backend_on`.
    """
    if engine.kernels == "pallas" and unsupported is not None:
        raise NotImplementedError(f"EngineConfig: kernels='pallas': {unsupported}")
    backend = backend_on(device, engine, config)
    return backend if engine.kernels != "auto" or unsupported is None else XLA


def why_unsupported(config: ModelConfig, geometry: Geometry, engine: EngineConfig) -> str | None:
    """Why the kernels cannot run a model's steps, or None. Operations that can be left to XLA alone do not count."""
    reasons = [residual_unsupported(width) for width in {width for _, width in config.parts}]
    for spec in (*config.paged, *config.recurrent):
        kind = LAYER_STEPS[PALLAS.layers].get(type(spec))
        if kind is None:
            reasons.append(f"there are no kernels for {type(spec).__name__}")
        else:
            reasons.append(kind.why_unsupported(spec, geometry, engine))
    return _first(reasons)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


# --- Triton ---------------------------------------------------------------------------------------


def _why_no_triton(backend: Backend, device: Device) -> str | None:
    """Why no Triton kernel at all is used, or None."""
    if backend.name != PALLAS.name:
        return f"the steps are made of {backend.about}"
    if not device.is_hopper:
        found = f"a GPU of {device.capability}" if device.capability else device.platform
        return f"needs a GPU of compute capability 9.0 (Hopper), found {found}"
    return jax_triton.why_unavailable()


# --- trials ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """Runs Triton kernels on a device before the first prompt does. Each method says what went wrong, or None.

    A trial finds faults of a driver, a compiler or a version of jax-triton. If a Triton kernel cannot do its work or
    does it wrongly, the Pallas kernel is used.

    Attributes:
        place: the device of the trials; None for jax's default device.
        store: remembers passed trials, so that the next process need not repeat them; or None.
    """

    place: jax.Device | None = None
    store: ProgramStore | None = None

    def of_scan(self, group: StateGroup, geometry: Geometry) -> str | None:
        """Tries the kernels that scan prompts through layers of one group."""
        spec, kind = group.layout.spec, group_steps(group, PALLAS)
        return kind.triton_unsupported(spec, geometry) or self._tried(
            f"scan {group} {geometry}", lambda: kind.try_triton(group, geometry)
        )

    def of_sampling(self, vocab_size: int) -> str | None:
        """Tries the kernels that draw tokens."""
        return self._tried(f"sampling {vocab_size}", lambda: try_sampling(vocab_size))

    def _tried(self, what: str, trial: Callable[[], str | None]) -> str | None:
        """Runs a trial that was not passed before.

        An error that says nothing about a kernel is raised. If it counted, the next start might choose other kernels.
        """
        if self.store is not None and self.store.verdict(what) == PASSED:
            return None
        where = contextlib.nullcontext() if self.place is None else jax.default_device(self.place)
        with where:
            try:
                wrong = trial()
            except Exception as failed:
                place = self.place or jax.devices()[0]
                wrong = fault_of(failed, place, tried="Triton kernels", remedy=WITHOUT_TRITON)
                if wrong is None:
                    raise
        if wrong is None:
            if self.store is not None:
                self.store.note(what, PASSED)
            return None
        LOG.warning("Triton kernels failed a trial, Pallas kernels serve: %s", wrong)
        return f"they failed a trial: {wrong}"


def try_sampling(vocab_size: int) -> str | None:
    """Draws tokens in a loop, as decode does. Says how many differ from those of the Pallas kernel; None if none does.

    There are two rows for each setting. In the second one the most likely token is banned. One row has equal logits.
    """
    temperature, top_k, top_p, min_p = jnp.tile(jnp.array(SETTINGS), (2, 1)).T
    rows = temperature.shape[0]
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (rows, vocab_size)).at[len(SETTINGS) - 1].set(1.0)
    bans = jnp.where(jnp.arange(rows) < len(SETTINGS), -1, jnp.argmax(logits, -1))
    unused = jnp.full((rows, MAX_STOP_IDS - 1), -1)  # as many bans as in the steps
    given = SamplingArrays(
        logits=logits,
        keys=jax.random.bits(keys[1], (rows, 2)),
        temperature=temperature,
        top_k=top_k.astype(jnp.int32),
        top_p=top_p,
        min_p=min_p,
        banned=jnp.concatenate([bans[:, None], unused], axis=1),
    )
    want, found = (_tokens(given, implementation) for implementation in ("pallas", "triton"))
    wrong = int((found != want).sum())
    return f"{wrong} of {want.size} tokens are not the Pallas kernel's" if wrong else None


def _tokens(given: SamplingArrays, implementation: Implementation) -> np.ndarray:
    """The tokens int32[2, B] of two steps, each with keys of its own."""

    def draw(step, tokens):
        keys = given.keys + step.astype(jnp.uint32)
        drawn = sample_tokens(given._replace(keys=keys), implementation=implementation)
        return tokens.at[step].set(drawn)

    def run(num_steps):  # an argument, so that the compiler does not know that there are two
        return jax.lax.fori_loop(0, num_steps, draw, jnp.zeros((2, len(given.keys)), jnp.int32))

    return np.asarray(jax.jit(run)(jnp.int32(2)))
