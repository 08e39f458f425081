"""The committed answers of transformers to other values of fields, as `make_field_goldens` writes them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.parity.field_values import Case, cases_of

FOLDER = Path(__file__).parent / "fields"
PROMPT = 24  # tokens
STORED = 16  # logits of a case: those of the first tokens of the vocabulary
# What became of a case: the logits are as before, or others; it is refused; or it is unclear what it means.
SAME, OTHER, REFUSED, UNCLEAR = "soru"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What transformers makes of the cases of one golden.

    Attributes:
        version: of transformers.
        known: names of the fields that transformers knows, by the object in the file that they lie in ("" is the file).
        cases: what each changes, and what became of it.
        logits: float32[`STORED`] of each case that has others, in order.
    """

    version: str
    known: dict[str, list[str]]
    cases: list[tuple[Case, str]]
    logits: np.ndarray


def digest(cases: list[Case]) -> str:
    """Says whether two lists of cases are the same."""
    return hashlib.sha256(json.dumps(cases).encode()).hexdigest()[:16]


def store(golden: Path, answers: Answers) -> None:
    """Writes the answers to the cases of one golden."""
    head = {"transformers": answers.version, "known": answers.known}
    head["digest"] = digest([case for case, _ in answers.cases])
    head["answers"] = "".join(kind for _, kind in answers.cases)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{golden.name}.json").write_text(json.dumps(head) + "\n")
    np.savez_compressed(FOLDER / f"{golden.name}.npz", logits=answers.logits)


def load(golden: Path) -> Answers:
    """The answers to the cases of one golden.

    Raises:
        ValueError: the cases are no longer those that were asked.
    """
    found = json.loads((FOLDER / f"{golden.name}.json").read_text())
    cases = cases_of(golden, found["known"])
    if digest(cases) != found["digest"]:
        raise ValueError(
            f"the cases of {golden.name} are others now; run "
            f"python -m tests.parity.make_field_goldens --only {golden.name}"
        )
    with np.load(FOLDER / f"{golden.name}.npz") as arrays:
        logits = arrays["logits"]
    pairs = list(zip(cases, found["answers"], strict=True))
    return Answers(version=found["transformers"], known=found["known"], cases=pairs, logits=logits)
