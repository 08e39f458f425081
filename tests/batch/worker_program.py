"""A worker over the engine without a model of `batch_program`."""

from __future__ import annotations

import sys

from hybrid_jax.worker import program
from tests.batch.batch_program import without_model

if __name__ == "__main__":
    without_model()
    program.main(sys.argv[1:])
