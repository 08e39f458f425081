"""No test changes what others share: settings, the working folder, who logs what. Else the order of tests matters."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import jax
import pytest

# Others are set by pytest, and by libraries once in a process.
OURS = ("HYBRID_JAX", "JAX_", "XLA_FLAGS")


def shared_by_all() -> dict[str, object]:
    """What tests of one process have in common, by a name for people."""
    known = logging.root.manager.loggerDict
    loggers = ("root", *(name for name in known if name.startswith("hybrid_jax")))
    return {
        "the working folder": os.getcwd(),
        **{
            f"os.environ[{name!r}]": value
            for name, value in os.environ.items()
            if name.startswith(OURS)
        },
        **{f"jax.config.{name}": value for name, value in jax.config.values.items()},
        **{f"the level of logger {name}": logging.getLogger(name).level for name in loggers},
        "the handlers of logger hybrid_jax": tuple(logging.getLogger("hybrid_jax").handlers),
    }


@contextlib.contextmanager
def as_found() -> Iterator[None]:
    """Around what must put back all that it changes.

    Raises:
        AssertionError: it did not; what it left is in the message.
    """
    before = shared_by_all()
    yield
    after = shared_by_all()
    changed = {
        name: (before.get(name), after.get(name))
        for name in before | after
        if before.get(name) != after.get(name)
    }
    assert not changed, f"a test must put back what it changes, best by monkeypatch: {changed}"


@pytest.fixture(autouse=True)
def leaves_all_as_found():
    """Fails the test that changed something, not the one that runs after it."""
    with as_found():
        yield
