"""Asks transformers what it makes of directories with every combination of a model's small files.

    python -m tests.parity.make_small_files

Needs the extra `parity`. The answers go into goldens/small_files.json: each different one once, and the number of the
one of each combination, in the order of `small_files.combinations`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from tests.parity.small_files import ANSWERS, GENERATION, TEXTS, VARIANTS, combinations, write


def of_tokenizer(folder: Path) -> dict[str, Any]:
    """What a tokenizer makes of the texts, its special tokens, and its chat templates."""
    made = transformers.AutoTokenizer.from_pretrained(folder)
    templates = made.chat_template or {}
    return {
        "ids": [made.encode(text) for text in TEXTS],
        "plain ids": [made.encode(text, add_special_tokens=False) for text in TEXTS],
        "texts": [
            [made.decode(made.encode(text), skip_special_tokens=skip) for text in TEXTS]
            for skip in (False, True)
        ],
        "size": len(made),
        "special": made.special_tokens_map,
        "ends": [made.bos_token_id, made.eos_token_id],
        "templates": templates if isinstance(templates, dict) else {"default": templates},
    }


def of_generation(folder: Path) -> dict[str, Any]:
    """What `generate` would take where a call says nothing."""
    file = folder / transformers.utils.GENERATION_CONFIG_NAME
    if file.is_file():
        made = transformers.GenerationConfig.from_pretrained(folder)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        made = transformers.GenerationConfig.from_model_config(config)
    names = (
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
    )
    return {"eos_token_id": made.eos_token_id} | {name: getattr(made, name) for name in names}


def answered(variants: Mapping[str, Mapping[str, Any]], ask: Any) -> dict[str, Any]:
    """The different answers, and the number of each combination's."""
    answers: list[dict[str, Any]] = []
    numbers = []
    with tempfile.TemporaryDirectory() as held:
        for index, chosen in enumerate(combinations(variants)):
            answer = ask(write(Path(held) / str(index), chosen))
            if answer not in answers:
                answers.append(answer)
            numbers.append(answers.index(answer))
    return {"answers": answers, "numbers": numbers}


def main() -> None:
    """Writes the file."""
    transformers.utils.logging.set_verbosity_error()
    made = {
        "transformers": transformers.__version__,
        "tokenizer": answered(VARIANTS, of_tokenizer),
        "generation": answered(GENERATION, of_generation),
    }
    ANSWERS.write_text(json.dumps(made, ensure_ascii=False) + "\n", encoding="utf-8")
    print(
        f"{ANSWERS}: {ANSWERS.stat().st_size} bytes,",
        *(
            f"{len(made[name]['answers'])} of {len(made[name]['numbers'])}"
            for name in ("tokenizer", "generation")
        ),
    )


if __name__ == "__main__":
    main()
