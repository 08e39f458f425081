"""Walks the fields of transformers' config classes and writes what each value does there, for test_fields.py.

    python -m tests.parity.make_field_goldens                      all goldens that are walked
    python -m tests.parity.make_field_goldens --only llama_llama3  those named

Needs the extra `parity`. Transformers knows a field if its config class has it, if the class takes it from what else a
file gives, or if anything asked the config for it while a model was loaded and run.

Each case is a directory with the weights of the golden and a changed config.json, read by `from_pretrained`. What is
compared are the logits after the first `PROMPT` tokens of the golden's longest prompt. They stay as they were, or there
are others. Or the case is refused: so are weights that are missing or have another shape, and logits that are not
finite. Or it is unclear, because a whole sequence says one thing, and the same tokens one by one say another. As in
`make_goldens`, nemotron_h has the limits of its config.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.parity.field_values import WALKED, cases_of, changed
from tests.parity.fields import OTHER, PROMPT, REFUSED, SAME, STORED, UNCLEAR, Answers, store
from tests.parity.goldens import COMMITTED, load_answers
from tests.parity.make_goldens import follow_published_limits
from tests.parity.swiftkv_torch import register

TAKEN = re.compile(r"""kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"|"(\w+)" in kwargs""")
STILL = 1e-4  # logits that differ by less stay as they were
TORN = 1e-2  # logits with a cache that differ by more say something else
# Methods and settings of the config classes, which are no fields; but for properties that a file may set.
OWN = set(dir(PretrainedConfig)) - {field.name for field in dataclasses.fields(PretrainedConfig)}
OWN -= {"rope_scaling", "per_layer_config", "num_labels", "output_attentions"}


class Asked:
    """Names that anything but the config classes themselves asks a config for, by its class."""

    def __init__(self) -> None:
        self.names: dict[type, set[str]] = defaultdict(set)

    def __enter__(self) -> Asked:
        self.plain = PretrainedConfig.__getattribute__

        def getattribute(config, name: str):
            if "configuration_utils" not in sys._getframe(1).f_code.co_filename:
                self.names[type(config)].add(name)
            return self.plain(config, name)

        PretrainedConfig.__getattribute__ = getattribute
        return self

    def __exit__(self, *error) -> None:
        PretrainedConfig.__getattribute__ = self.plain


def taken(code) -> set[str]:
    """Names that a function or class takes out of its keyword arguments."""
    return {first or second for first, second in TAKEN.findall(inspect.getsource(code))}


def known_names(config_class: type, asked: Asked) -> list[str]:
    """Names of the fields that transformers knows for a class."""
    names = {field.name for field in dataclasses.fields(config_class)} | taken(config_class)
    names |= taken(PretrainedConfig.__post_init__) | set(config_class.attribute_map)
    names |= taken(PretrainedConfig.convert_rope_params_to_dict)
    names |= {name for name, value in vars(config_class).items() if isinstance(value, property)}
    return sorted(
        name for name in names | (asked.names[config_class] - OWN) if not name.startswith("_")
    )


@torch.no_grad()
def logits_of(folder: Path, prompt: list[int]) -> tuple[np.ndarray, float]:
    """float32[V] after the last token, and how far logits of the next one are from those of a whole sequence."""
    values = json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    if "text_config" in values:
        auto = transformers.AutoModelForImageTextToText
    model, found = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if found["missing_keys"]:
        raise ValueError(f"missing weights: {sorted(found['missing_keys'])}")
    if values.get("model_type") == "nemotron_h":
        follow_published_limits(model)
    model.eval()

    def whole(tokens: list[int]) -> torch.Tensor:
        answer = model(torch.tensor([tokens]), use_cache=False)
        return (answer[0] if isinstance(answer, tuple) else answer.logits)[0, -1]

    logits = whole(prompt)
    if not torch.isfinite(logits).all():
        raise ValueError("logits are not finite")
    apart = 0.0
    if "swiftkv" not in values["model_type"]:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=2,
            max_new_tokens=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        first = int(made.sequences[0, len(prompt)])
        apart = float((made.logits[1][0] - whole([*prompt, first])).abs().max())
    return logits.float().numpy(), apart


def walk(golden: Path) -> None:
    """Writes what each case of one golden does."""
    values = json.loads((golden / "config.json").read_text())
    prompt = load_answers(golden)[-1].prompt[:PROMPT]
    with Asked() as asked:
        plain, usual = logits_of(golden, prompt)
    known = {"": known_names(CONFIG_MAPPING[values["model_type"]], asked)}
    if "text_config" in values:
        inner = CONFIG_MAPPING[values["text_config"]["model_type"]]
        known["text_config"] = known_names(inner, asked)
    cases = cases_of(golden, known)
    rows: list[np.ndarray] = []
    answers: list[str] = []
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in golden.glob("model*.safetensors*"):
                (folder / file.name).symlink_to(file)
            (folder / "config.json").write_text(json.dumps(changed(values, case)))
            try:
                logits, apart = logits_of(folder, prompt)
            except Exception as error:  # whatever keeps it from an answer
                print(f"{golden.name} {case}: {type(error).__name__} {str(error)[:200]!r}")
                answers.append(REFUSED)
                continue
        if usual < TORN < apart:
            print(f"{golden.name} {case}: other logits token by token, by {apart:.2g}")
            answers.append(UNCLEAR)
            continue
        difference = float(np.abs(logits - plain).max()) if logits.shape == plain.shape else np.inf
        if difference < STILL:
            answers.append(SAME)
            continue
        print(f"{golden.name} {case}: other logits, by {difference:.2g}")
        answers.append(OTHER)
        rows.append(logits[:STORED])
    found = Answers(
        version=transformers.__version__,
        known=known,
        cases=list(zip(cases, answers, strict=True)),
        logits=np.array(rows, np.float32).reshape(-1, STORED),
    )
    store(golden, found)
    counts = {kind: answers.count(kind) for kind in (SAME, REFUSED, UNCLEAR)}
    print(f"== {golden.name}: {len(cases)} cases, {len(rows)} with other logits, {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WALKED, default=WALKED, metavar="NAME")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    register()
    torch.set_num_threads(1)
    for name in args.only:
        walk(COMMITTED / name)


if __name__ == "__main__":
    main()
