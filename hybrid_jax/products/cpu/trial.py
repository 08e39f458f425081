"""A trial of new machine code in a process of its own: if XLA hands over something else than was thought, only that
process ends.

`python -m hybrid_jax.products.cpu.trial VARIANT VERSION` reads machine code from its input, and writes what is wrong.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.products.cpu.build import Recipe, recipe, register
from hybrid_jax.products.cpu.calls import ROWS, call
from hybrid_jax.products.cpu.source import TARGETS, Target

SECONDS = 120.0
# Sizes K and N: blocks that come out even, and such that do not. Threads help in the second one.
SIZES = ((128, 64), (1056, 1100))
COUNTS = (1, 3, 8)
CRASHES = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
# Of the sum of the sizes of all products: what float32 sums of parts may be off, and what bfloat16 rounds.
BOUNDS = {"f32": 1e-6, "bf16": 2.0**-8}


class Undecided(Exception):
    """A trial that said nothing about the code: no process could be started, or somebody ended it."""


def fault_of(made: Recipe, image: bytes) -> str | None:
    """What is wrong with machine code, or None. It is tried in another process.

    Raises:
        Undecided: as it says.
    """
    program = Path(sys.executable or "").name
    if getattr(sys, "frozen", False) or not program.startswith(("python", "pypy")):
        raise Undecided(f"sys.executable is {sys.executable!r}, which is no Python to try them")
    command = [sys.executable, "-m", __name__, made.variant.name, made.version]
    try:
        done = subprocess.run(
            command,
            input=image,
            capture_output=True,
            timeout=SECONDS,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the caller alone
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise Undecided(f"no process could try them: {error}") from None
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0:
        return said or None
    if -done.returncode in CRASHES:
        return f"a trial ended with {signal.Signals(-done.returncode).name}"
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise Undecided(f"a trial ended with exit code {done.returncode}: {last}")


def _environment() -> dict[str, str]:
    """Where the other process finds the packages of this one. Settings of jax and of warnings are not passed on."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_") and name != "PYTHONWARNINGS"
    }
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, *(entry for entry in sys.path if entry)])
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def wrong_products(made: Recipe) -> str | None:
    """Small products of each kind against sums in float64; says which are wrong."""
    rng, wrong = np.random.default_rng(0), []
    for (K, N), x_dtype in itertools.product(SIZES, DTYPES):
        x = jnp.asarray(rng.standard_normal((ROWS, K)), DTYPES[x_dtype])
        numbers = rng.standard_normal((2, K, N))
        weights = {name: jnp.asarray(numbers, dtype) for name, dtype in DTYPES.items()}
        for target, found in _products(made, x, weights).items():
            if not _is_right(found, x, weights[target.weights], x_dtype):
                wrong.append(f"{target.name} of {x_dtype} [{K}, {N}]")
    return f"wrong products: {', '.join(wrong)}" if wrong else None


def _products(
    made: Recipe, x: jax.Array, weights: dict[str, jax.Array]
) -> dict[Target, list[np.ndarray]]:
    """Of each kind the products of some rows with the second of two matrices, for several counts of rows."""

    def run(x: jax.Array, weights: dict[str, jax.Array], which: jax.Array) -> list[list[jax.Array]]:
        found = []
        for target in TARGETS:
            w = weights[target.weights]
            w = w if target.chosen else w[1].T if target.layout == "rows" else w[1]
            chosen = which if target.chosen else None
            found.append([call(made.version, target, x[:rows], w, chosen) for rows in COUNTS])
        return found

    found = jax.device_get(jax.jit(run)(x, weights, jnp.array([1], jnp.int32)))
    return dict(zip(TARGETS, found, strict=True))


def _is_right(found: list[np.ndarray], x: jax.Array, weights: jax.Array, x_dtype: str) -> bool:
    """Whether products are near enough, and a row is the same whatever rows there are beside it."""
    rows, exact = (np.asarray(each, np.float64) for each in (x[: COUNTS[-1]], weights[1]))
    off = np.abs(found[-1].astype(np.float64) - rows @ exact)
    near = (off <= BOUNDS[x_dtype] * (np.abs(rows) @ np.abs(exact))).all()
    return bool(near) and all((part == found[-1][: len(part)]).all() for part in found)


def main() -> None:
    """Tries the machine code that comes in."""
    name, version = sys.argv[1:]
    made = recipe(name)
    if made.version != version:
        sys.exit(f"its version is {made.version}, not {version}")
    register(made, sys.stdin.buffer.read())
    print(wrong_products(made) or "")


if __name__ == "__main__":
    main()
