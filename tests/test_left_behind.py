"""A test that leaves something behind fails by itself."""

from __future__ import annotations

import logging
import os

import jax
import pytest

from tests.imports import ROOT
from tests.left_behind import as_found

HERE, BEFORE = os.getcwd(), logging.root.level
LOUD = logging.getLogger("hybrid_jax.engine")
MODES = ("jax_default_matmul_precision", "highest"), ("jax_default_matmul_precision", None)
# What is changed, and what puts it back.
CHANGES = {
    "the level of logger hybrid_jax.engine": (
        lambda: LOUD.setLevel("INFO"),
        lambda: LOUD.setLevel(logging.NOTSET),
    ),
    "the level of logger root": (
        lambda: logging.root.setLevel(1),
        lambda: logging.root.setLevel(BEFORE),
    ),
    "the handlers of logger hybrid_jax": (
        lambda: LOUD.parent.addHandler(logging.lastResort),
        lambda: LOUD.parent.removeHandler(logging.lastResort),
    ),
    "the working folder": (lambda: os.chdir(ROOT / "tests"), lambda: os.chdir(HERE)),
    "os.environ['HYBRID_JAX_LEFT']": (
        lambda: os.environ.update(HYBRID_JAX_LEFT="1"),
        lambda: os.environ.pop("HYBRID_JAX_LEFT"),
    ),
    "jax.config.jax_default_matmul_precision": (
        lambda: jax.config.update(*MODES[0]),
        lambda: jax.config.update(*MODES[1]),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_left_behind_is_named(what):
    change, put_back = CHANGES[what]
    try:
        with pytest.raises(AssertionError, match="put back") as said, as_found():
            change()
    finally:
        put_back()
    assert what in str(said.value)
    with as_found():
        change()
        put_back()
