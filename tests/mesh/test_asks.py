"""What callers may ask of a divided model beside plain tokens: forms, drafters of their own, several threads."""

from __future__ import annotations

import threading

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.models.files import BUNDLED

FORM = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["def add(a, b):\n", "import numpy as np\n" * 9, "class A:\n    x = "]


@pytest.fixture(scope="module")
def both():
    with LLM(quiet=True, max_rows=4) as one, LLM(quiet=True, max_rows=4, mesh="tp=3") as two:
        yield one, two


def texts(outputs):
    return [[each.text for each in out.outputs] for out in outputs]


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json=FORM),
        StructuredOutputsParams(regex=r"[0-9]{3}-[a-f]{4}"),
        StructuredOutputsParams(choice=["yes", "no"]),
    ],
)
def test_forms(both, form):
    params = SamplingParams(structured_outputs=form, temperature=0.8, seed=3, max_tokens=80, n=2)
    one, two = (texts(llm.generate(PROMPTS, params)) for llm in both)
    assert one == two and all(text for each in one for text in each)


def test_threads(both):
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=1)
    [expected] = texts(both[0].generate([PROMPTS[0]], params))
    found: list[list[str]] = []

    def ask() -> None:
        for _ in range(3):
            found.extend(texts(both[1].generate([PROMPTS[0]], params)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_a_drafter_in_a_directory_of_its_own(both):
    params = SamplingParams(max_tokens=40, temperature=0.0)
    with LLM(quiet=True, max_rows=4, mesh="tp=3", speculation=f"draft:{BUNDLED}") as drafting:
        assert texts(drafting.generate(PROMPTS, params)) == texts(both[0].generate(PROMPTS, params))
        assert drafting.stats()["accepted_draft_tokens"] > 20
