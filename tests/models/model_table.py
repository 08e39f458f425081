"""Makes docs/reference/models.md from the code: python -m tests.models.model_table

What a family has follows from the configs of its goldens, which cover every field that changes the result, and from the
tables in which kinds and kernels are found.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import MLP, Attention, Mamba1, Mamba2, ModelConfig, MoE, is_feed_forward
from hybrid_jax.costs import weight_count
from hybrid_jax.engine.mixers.table import LAYER_STEPS
from hybrid_jax.inspection.report import ModelReport, inspect_model
from hybrid_jax.kinds.kind import RecurrentKind
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.models import FAMILIES
from hybrid_jax.models.hf_config import HARMLESS, REFUSED
from hybrid_jax.models.known import known, load_known
from tests.parity.field_values import WALKED
from tests.parity.fields import load
from tests.parity.goldens import COMMITTED, GOLDENS, config_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
HEAD = """# Models

`LLM(path)` reads Hugging Face directories of these families (`model_type` in config.json). Each is compared with
transformers on tiny random models of odd shapes (`tests/parity`): logits within 5e-4 in float32, or 2e-3 with gated
delta nets, and 32 greedy tokens each. A field that changes the result and is not supported is refused with its name and
value ([below](#fields-of-configjson)). Weights of 8 and 4 bits are read
[as they are published](../how_to/quantize.md).

This page is made from the code, by `python -m tests.models.model_table`, and a test checks it.
"""
KINDS_HEAD = """
## Kinds of recurrent layers

| kind | what a sequence keeps beside its checkpoint | on a CPU | on an NVIDIA GPU |
| --- | --- | --- | --- |
"""
FAMILIES_HEAD = """
## Families

| `model_type` | recurrent layers | attention | feed-forward | more |
| --- | --- | --- | --- | --- |
"""
FIELDS = """
## Fields of config.json

Transformers decides what a file means. Each field that its config class knows is read, refused with its name and
value, or makes no difference here. Null and absent mean what transformers makes of them. A field that transformers does
not know makes no difference either; a logger named `hybrid_jax.models` says at level INFO which ones a file has.

`tests/parity/test_fields.py` gives every field of every family other values. It checks that the logits change as those
of transformers {version} do, or that the value is refused.

{refused}

{harmless}

| `model_type` | makes no difference either |
| --- | --- |
"""
MTP = """
## Heads that predict several tokens

Some checkpoints have a head for multi-token prediction. An engine with `speculation="mtp"` reads it and drafts with it
([Speculative decoding](../how_to/speculation.md)). `load_model(mtp=True)` reads it too; otherwise it is left out.
Asking for the head of a checkpoint that has none is an error.

One head is supported. For each further token it runs again, on its own last output. A checkpoint with a second head
for the second token is refused. So is a head with recurrent layers, if an engine is to draft with it.

No released Granite has a head. For `granitemoehybrid` the tensors have the names that Qwen3-Next gives them.
"""
KNOWN_HEAD = """
## Known sizes

`inspect` and `simulate` take these by name, or by the name of a repository on the hub. `pool-sim` takes those that have
both attention and recurrent layers. Nothing is downloaded. Of these names only `tiny_gated_delta` has weights here
([The bundled models](../studies/bundled_model.md)). `LLM()` without a name runs the model in the package, a
`granitemoehybrid`.

The columns of cards say how many sequences of 8,192 tokens, or of the model's longest, run at once, in bfloat16. A -
says that the model does not fit the card. `hybrid-jax inspect NAME --device CARD` says more
([choose memory](../how_to/choose_memory.md)).

"""
SHOWN_CARDS = {"a100-40gb": "A100, 40 GB", "h100": "H100, 80 GB", "h200": "H200, 141 GB"}
LENGTH = 8192
TAIL = """
## A small model without weights

With a config.json of small sizes and random weights you can see how a family runs here, and how fast. Such a model has
no tokenizer: it takes and gives token ids. `hybrid_jax/models/families/` names the tensors of each family, and loading
names the first one that is missing, with its shape.

```python run
from hybrid_jax import LLM, SamplingParams
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.initialize import random_params

fields = dict(
    model_type="qwen3_5_text",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
)
fields |= dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024
)
fields |= dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
config = config_from_hf(fields)  # or json.load of a config.json
llm = LLM.from_params(config, random_params(config, seed=0), max_rows=2, prefill_tokens=64)
(output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8))
assert len(output.outputs[0].token_ids) == 8
```
"""
NOTES = {
    "llama_swiftkv": "Llama with a cut: prompts skip the later layers ([models with a cut](../how_to/swiftkv.md))",
    "qwen2": "also Qwen2.5; biases on q, k, v",
    "qwen2_swiftkv": "Qwen2 with a cut",
    "mamba2": "also Codestral Mamba",
    "qwen3_5": "Qwen3.5 and 3.6; the text of a model of text and images, whose vision tower is not read",
    "qwen3_5_moe": "as `qwen3_5`",
    "falcon_h1": "attention and Mamba-2 side by side; multipliers, of which loading multiplies some into weights",
}


def page() -> str:
    """The whole page."""
    text = HEAD + KINDS_HEAD
    for spec, kind in KINDS.items():
        if isinstance(kind, RecurrentKind) and spec.__module__.startswith("hybrid_jax."):
            gpu = "Pallas kernels" if spec in LAYER_STEPS["pallas"] else "what XLA compiles"
            text += f"| {kind.name} | {_kept(spec)} | what XLA compiles | {gpu} |\n"
    text += FAMILIES_HEAD
    for family in FAMILIES:
        configs = [config for config in map(config_of, GOLDENS) if config.family == family]
        cells = (_recurrent(configs), _attention(configs), _feed_forward(configs))
        text += f"| `{family}` | {' | '.join(cells)} | {_more(family, configs)} |\n"
    text += FIELDS.format(
        version=load(COMMITTED / WALKED[0]).version,
        refused=_wrapped(
            f"These are refused in every family, unless they are empty: {_listed(REFUSED)}. "
            "So is `is_causal`, unless it is true, where there is attention."
        ),
        harmless=_wrapped(f"These make no difference in any family: {_listed(HARMLESS)}."),
    )
    for name, family in FAMILIES.items():
        text += f"| `{name}` | {_listed(family.harmless)} |\n"
    text += MTP + KNOWN_HEAD
    cards = " | ".join(SHOWN_CARDS.values())
    text += f"| name | family | parameters | weights | {cards} | repositories |\n"
    text += f"| --- | --- | ---: | ---: |{' ---: |' * len(SHOWN_CARDS)} --- |\n"
    for name, fields in known().items():
        config = load_known(name)
        repositories = ", ".join(fields.get("_repositories", ())) or "-"
        count = weight_count(config)
        size = f"{count / 1e9:.2f} B" if count > 1e8 else f"{count / 1e6:.2f} M"
        found = [inspect_model(name, device=card, dtype="bfloat16") for card in SHOWN_CARDS]
        cells = [size, format_size(found[0]["weight_bytes"]), *map(_sequences, found)]
        text += f"| `{name}` | `{config.family}` | {' | '.join(cells)} | {repositories} |\n"
    return text + TAIL


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "-"


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _sequences(found: ModelReport) -> str:
    """How many sequences of `LENGTH` tokens, or of the model's longest, run at once."""
    if not found["fits"]:
        return "-"
    rows = found["fit"]["rows"]
    return f"{rows.get(LENGTH) or list(rows.values())[-1]:,}"


def _kept(spec: type) -> str:
    layouts = [
        KINDS[spec].layout(mixer)
        for config in map(config_of, GOLDENS)
        for mixer in config.recurrent
        if type(mixer) is spec
    ]
    if layouts[0].carries:
        return "the state"
    return "a record of each token" if layouts[0].records else "only the last inputs"


def _all(found: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(found)) or "none"


def _recurrent(configs: list[ModelConfig]) -> str:
    def words(mixer: object) -> str:
        name = KINDS[type(mixer)].name
        if isinstance(mixer, Mamba2) and mixer.gated_norm != "gate_first":
            return (
                f"{name}, {'norm before gate' if mixer.gated_norm == 'norm_first' else 'no norm'}"
            )
        if isinstance(mixer, Mamba1) and mixer.norms != "none":
            return f"{name}, {mixer.norms} norms of dt, B, C"
        return name

    return _all(words(mixer) for config in configs for mixer in config.recurrent)


def _attention(configs: list[ModelConfig]) -> str:
    def words(spec: Attention) -> str:
        rotation = "no rotation"
        if spec.rope is not None:
            whole = spec.rope.dim == spec.head_dim
            rotation = "rotated" if whole else "partly rotated"
        scale = "own scale" if spec.scale is not None else ""
        named = (("q and k normed", spec.qk_norm), ("gated", spec.gate), (scale, bool(scale)))
        return ", ".join([rotation, *(name for name, there in named if there)])

    return _all(words(spec) for config in configs for spec in config.mixers(Attention))


def _feed_forward(configs: list[ModelConfig]) -> str:
    def words(spec: MLP | MoE) -> str:
        act = "gated SiLU" if spec.kind == "gated_silu" else "relu²"
        if isinstance(spec, MLP):
            return act
        shared = ", a shared one" if spec.shared_width else ""
        gate = " with a gate" if spec.shared_gate else ""
        return f"experts ({act}, {spec.routing}){shared}{gate}"

    parts = [part for config in configs for part, _ in config.parts]
    return _all(words(part) for part in parts if is_feed_forward(part))


def _more(family: str, configs: list[ModelConfig]) -> str:
    found = [NOTES[family]] if family in NOTES else []
    if FAMILIES[family].mtp is not None:
        found.append("has a head for multi-token prediction")
    multiplied = any(config.embedding_multiplier != 1 for config in configs)
    if multiplied and family not in NOTES:
        found.append("multipliers")
    return "; ".join(found) or "-"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
