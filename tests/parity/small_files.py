"""Directories with every combination of a model's small files, for transformers and for us.

`VARIANTS` gives for each file what it may hold; None leaves it out. `write` makes one directory. What transformers
makes of each is in goldens/small_files.json, which `make_small_files` writes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from hybrid_jax.text.tokenizer import byte_alphabet

ANSWERS = Path(__file__).resolve().parent / "goldens" / "small_files.json"
TEXTS = ("ab", "<s>a<|im_end|>", "</s> <extra>x<more><|own|>", "")
# A model of the smallest size. Its `tokenizer_class` is that of files which transformers reads as they are.
FIELDS = {
    "model_type": "granitemoehybrid",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mamba_n_heads": 4,
    "layer_types": ["attention"],
    "shared_intermediate_size": 8,
    "num_local_experts": 0,
    "max_position_embeddings": 64,
}


def _token(text: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": text} | usual | {"special": True} | flags


DECODER = {
    "256": _token("<s>"),
    "257": _token("</s>", rstrip=True),
    "258": _token("<|im_start|>"),
    "259": _token("<|im_end|>"),
    "260": _token("<extra>", special=False),
}
LISTED = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
# By the path of each file: what it may hold.
VARIANTS: dict[str, dict[str, Any]] = {
    "tokenizer.json": {
        "plain": {},
        "puts bos first": {"first": "<s>"},
        "no special ones": {"special": ()},
    },
    "tokenizer_config.json": {
        "absent": None,
        "names": NAMES | {"chat_template": "of the config", "add_bos_token": True},
        "a decoder": NAMES | {"added_tokens_decoder": DECODER, "pad_token": None},
        "more": {"bos_token": "a", "image_token": "<|own|>", "chat_template": LISTED}
        | {"additional_special_tokens": ["<more>", "<|im_start|>"]},
        "named ones": {"eos_token": "<|end|>", "extra_special_tokens": {"own": "<|own|>"}},
    },
    "special_tokens_map.json": {
        "absent": None,
        "others": {
            "eos_token": _token("</s>", rstrip=True),
            "pad_token": "</s>",
            "bos_token": None,
        },
        "more": {"unk_token": "<unk>", "extra_special_tokens": ["<more>", {"content": "<extra>"}]},
    },
    "added_tokens.json": {"absent": None, "two": {"<extra>": 260, "<|im_end|>": 259}},
    "chat_template.jinja": {"absent": None, "a text": "of the jinja file"},
    "additional_chat_templates/tool_use.jinja": {"absent": None, "a text": "of the folder"},
}
EOS = {
    "absent": {},
    "null": {"eos_token_id": None},
    "one": {"eos_token_id": 257},
    "two": {"eos_token_id": [5, 257]},
}
SAMPLING = {
    "absent": None,
    "greedy": {"do_sample": False, "bos_token_id": 256},
    "sampled": {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.75}
    | {"min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 9},
}
GENERATION: dict[str, dict[str, Any]] = {
    "config.json": {name: ids for name, ids in EOS.items() if name != "absent"},
    "generation_config.json, end tokens": EOS,
    "generation_config.json, sampling": SAMPLING,
}


def combinations(variants: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The name of one variant for each file, in a fixed order."""
    for names in product(*variants.values()):
        yield dict(zip(variants, names, strict=True))


def write(folder: Path, chosen: Mapping[str, str]) -> Path:
    """A directory with the chosen variant of each file; those that are not named are absent."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(FIELDS | EOS[chosen.get("config.json", "absent")])
    )
    for path, name in chosen.items():
        if path not in VARIANTS or (content := VARIANTS[path][name]) is None:
            continue
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        if path == "tokenizer.json":
            file.write_text(tokenizer_text(**content))
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))
    ends = EOS[chosen.get("generation_config.json, end tokens", "absent")]
    sampling = SAMPLING[chosen.get("generation_config.json, sampling", "absent")]
    if sampling is not None:
        (folder / "generation_config.json").write_text(json.dumps(ends | sampling))
    return folder


@functools.cache
def tokenizer_text(
    special: tuple[str, ...] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), first: str = ""
) -> str:
    """A tokenizer.json of bytes, with special tokens, one of which may begin each text."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if special:
        backend.add_special_tokens(list(special))
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    return backend.to_str()
