"""Every field of config.json that transformers knows: our logits change as theirs do, or the value is refused.

Of each family, every field of transformers' config class gets other values, null and none at all, one at a time. What
transformers makes of them is committed (`make_field_goldens`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.models import FAMILIES, MODEL_TYPES, config_from_hf
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.hf_config import HARMLESS, HFConfig, plain
from hybrid_jax.weights import load_model
from tests.drawing import spine
from tests.parity import fields
from tests.parity.field_values import ABSENT, WALKED, Case, changed
from tests.parity.goldens import COMMITTED, FOLDER, GOLDENS, load_answers, tolerance

pytestmark = pytest.mark.skipif(
    FOLDER != COMMITTED, reason="HYBRID_JAX_GOLDENS names other goldens"
)
# Fields of which we refuse some values that change nothing there: what no weights here can have, numbers that are none
# (0 epsilon), fields that mean something in other families, and what the last token of the last layer does not show.
REFUSED_HERE = {
    *("dtype", "torch_dtype", "transformers_weights"),
    *("expand", "key_value_group_size", "max_position_embeddings"),
    *("layer_norm_epsilon", "mixer_rms_eps", "norm_eps", "rms_norm_eps"),
    *("kv_sharing_modes", "partial_rotary_factor", "per_layer_config", "sliding_window"),
    *("full_attention", "linear_attention", "position_embedding_type", "sliding_attention"),
    *("is_causal", "layer_types", "mamba_dt_min", "time_step_min"),
}


def file_of(golden: Path) -> dict:
    return json.loads((golden / "config.json").read_text())


def meaning(values: dict) -> tuple:
    """All that a file says about a model: its config, and how its tensors are read."""
    config = config_from_hf(values)
    family = FAMILIES[config.family].of(HFConfig(values, config.family))
    return config, repr(family.stored(config)), family.zeros, family.ignored


def ours(golden: Path, values: dict, folder: Path, known: dict[tuple, np.ndarray]) -> Any:
    """Our logits after the prompt, or the words with which the file is refused."""
    try:
        key = meaning(values)
        if key not in known:
            for file in golden.glob("model*.safetensors*"):
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(file)
            (folder / "config.json").write_text(json.dumps(values))
            config, params = load_model(folder)
            prompt = jnp.asarray([load_answers(golden)[-1].prompt[: fields.PROMPT]])
            logits = forward(params, prompt, config, lengths=jnp.asarray([fields.PROMPT]))
            known[key] = np.asarray(logits)[0, -1]
        return known[key]
    except (ValueError, NotImplementedError) as error:
        return str(error)


def parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A field with its value, and those inside it."""
    yield name, value
    if isinstance(value, dict) and value != ABSENT:
        for inner, item in value.items():
            yield from parts(inner, item)
    for item in value if isinstance(value, list) else ():
        yield from parts(name, item)


def names_the_cause(message: str, case: Case) -> bool:
    """Whether an error names a field of the case, and the value it was given; or the weights that do not fit it."""
    if message.startswith("load_model:"):
        return "tensor" in message
    for path, changed_to in case.items():
        for name, value in parts(path.split(".")[-1], plain(changed_to)):
            if name in message and (value in (ABSENT, None) or reprlib.repr(value) in message):
                return True
    return False


def wrong_refusal(case: Case, kind: str, message: str) -> str:
    """What is wrong with an error of ours; "" if nothing is."""
    if not names_the_cause(message, case):
        return f"refused without its name and value: {message}"
    needed = ABSENT in case.values() and "config.json needs" in message
    names = {name for path, value in case.items() for name, _ in parts(path.split(".")[-1], value)}
    if kind == fields.SAME and not needed and not REFUSED_HERE & names:
        return f"changes nothing there, refused here: {message}"
    return ""


def complaints(golden: Path, folder: Path) -> Iterator[str]:
    """What is wrong with our answers to the cases of one golden."""
    answers, values = fields.load(golden), file_of(golden)
    base = load_answers(golden)[-1].logits[fields.PROMPT - 1]
    known, others = {meaning(values): base}, iter(answers.logits)
    limit = tolerance(config_from_hf(values))
    for case, kind in answers.cases:
        if kind == fields.REFUSED:  # there is nothing to compare with, but no traceback either
            with contextlib.suppress(ValueError, NotImplementedError):
                meaning(changed(values, case))
            continue
        theirs = next(others) if kind == fields.OTHER else base[: fields.STORED]
        found, wrong = ours(golden, changed(values, case), folder, known), ""
        if isinstance(found, str):
            wrong = wrong_refusal(case, kind, found)
        elif kind == fields.UNCLEAR:
            # Of limits, what a whole sequence says counts, as in the published implementations.
            if not any(path.endswith("limit") for path in case):
                wrong = "not refused, but a whole sequence and single tokens disagree there"
        elif (off := float(np.abs(found[: fields.STORED] - theirs).max())) > limit:
            wrong = f"other logits than in transformers, by {off:.2g}"
        if wrong:
            yield f"{json.dumps(case)}: {wrong}"


@spine
def test_every_family_is_walked():
    walked = {MODEL_TYPES[file_of(COMMITTED / name)["model_type"]] for name in WALKED}
    assert walked == FAMILIES.keys()


@functools.cache
def asked(family: str) -> set[str]:
    """Fields that are read of some golden of a family, or where one field is absent."""
    names: set[str] = set()
    for golden in GOLDENS:
        values = file_of(golden)
        if MODEL_TYPES[values["model_type"]] == family:
            for path in ("", *values):  # the file, and the file without each field
                left = {name: value for name, value in values.items() if name != path}
                read = HFConfig(left, family)
                with contextlib.suppress(ValueError):
                    FAMILIES[family].read_config(read)
                    FAMILIES[family].of(read)
                names |= read.asked | (read.inner.asked if read.inner is not None else set())
    return names


@spine
@pytest.mark.parametrize("golden", WALKED)
def test_every_field_that_transformers_knows_is_read_refused_or_known_to_be_harmless(golden):
    family = MODEL_TYPES[file_of(COMMITTED / golden)["model_type"]]
    known = {name for names in fields.load(COMMITTED / golden).known.values() for name in names}
    assert not sorted(known - asked(family) - HARMLESS - FAMILIES[family].harmless)


@pytest.mark.parametrize("golden", WALKED)
def test_other_values_change_logits_as_in_transformers_or_are_refused(golden, tmp_path):
    wrong = list(complaints(COMMITTED / golden, tmp_path))
    assert not wrong, "\n".join(wrong)
