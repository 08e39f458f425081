"""The page of models says what the code does."""

from __future__ import annotations

import pytest

from tests.models.model_table import PAGE, page
from tests.parity.goldens import COMMITTED, FOLDER


@pytest.mark.skipif(FOLDER != COMMITTED, reason="HYBRID_JAX_GOLDENS names other goldens")
def test_the_page_of_models_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.models.model_table"
