"""Makes tiny random models with transformers, and what they answer, for test_parity.py.

    python -m tests.parity.make_goldens                              write all committed goldens anew
    python -m tests.parity.make_goldens --family llama               only those of one family
    python -m tests.parity.make_goldens --only llama_llama3          only those named
    python -m tests.parity.make_goldens --random 5 --seed 7 --out D  others, of random shapes, into D
    python -m tests.parity.make_goldens --family llama_swiftkv --published CHECKOUT   by the classes published with them

Needs the extra `parity` (torch on a CPU, transformers 5). Every parameter is redrawn, because the
usual initial values (ones, zeros, arange) hide most mistakes. Logits come from whole forward passes in
float32 without a cache and without padding. Where transformers departs from the published models it is
set straight here: nemotron_h raises the step size to `time_step_min` and leaves `time_step_limit`
aside; `follow_published_limits` gives every mixer the limits of its config. It has no models with a cut: those are in
`swiftkv_torch.py`. The committed ones were made with --published, by github.com/snowflakedb/ArcticTraining at b28638e.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from hybrid_jax.models import FAMILIES
from tests.parity.golden_variants import GOLDENS
from tests.parity.random_variants import random_variant
from tests.parity.swiftkv_torch import register

HERE = Path(__file__).resolve().parent / "goldens"
NUM_NEW = 32
MIN_GAP = 5e-3  # between the two best logits of every greedy step: ten times the tolerance


class NearTie(RuntimeError):
    """A model whose greedy continuations hang on differences too small to compare."""


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter and stored buffer anew, away from where a mistake would not show."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, mean: float, std: float) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    for name, tensor in model.state_dict(keep_vars=True).items():
        last = name.rsplit(".", 1)[-1]
        if last == "A_log":
            uniform(tensor, -1.5, 2.5)
        elif last == "dt_bias" or name.endswith("dt_proj.bias"):
            uniform(tensor, -5.0, 2.0)
        elif last == "D":
            normal(tensor, 0.0, 1.0)
        elif last in ("e_score_correction_bias", "expert_bias"):
            normal(tensor, 0.0, 0.5)
        elif last == "bias":
            normal(tensor, 0.0, 0.4)
        elif tensor.ndim == 1:
            normal(tensor, 1.0, 0.3)
        elif "conv1d" in name or ".conv.conv." in name:
            normal(tensor, 0.0, 0.6)
        elif "embed" in name:
            normal(tensor, 0.0, 1.0)
        else:
            normal(tensor, 0.0, 1.4 / tensor.shape[-1] ** 0.5)


def follow_published_limits(model: torch.nn.Module) -> None:
    """Bounds every mixer's step size by `time_step_limit` and by nothing else."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)


@torch.no_grad()
def answers(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Greedy continuation of `prompt`: logits of every position, the new tokens, the smallest gap."""
    tokens, gap = list(prompt), math.inf
    for _ in range(NUM_NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        gap = min(gap, float(best[0] - best[1]))
        tokens.append(int(logits.argmax()))
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().numpy(), tokens[len(prompt) :], gap


def config_and_seed(name: str, variant: dict) -> tuple[transformers.PretrainedConfig, int]:
    """The config of a variant, and the seed of its weights and prompts, which follows from `name` if it states none."""
    fields = dict(variant)
    family, seed = fields.pop("family"), fields.pop("seed", zlib.crc32(name.encode()))
    family = fields.pop("model_type", family)
    known = transformers.AutoConfig.for_model(family).to_dict()
    if unknown := fields.keys() - known:
        raise ValueError(f"{name}: transformers knows no field {sorted(unknown)} of {family!r}")
    usual = {"max_position_embeddings": 512, "chunk_size": 16, "mamba_chunk_size": 16}
    fields = {field: value for field, value in usual.items() if field in known} | fields
    return transformers.AutoConfig.for_model(family, **fields), seed


def make(folder: Path, variant: dict, lengths: tuple[int, ...], shard: str | None = None) -> None:
    """Writes one model and its answers; takes other prompts until no greedy step is a near tie."""
    config, seed = config_and_seed(folder.name, variant)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    if "text_config" in variant:
        model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    else:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config).float().eval()
    redraw(model, seed)
    follow_published_limits(model)
    rng = random.Random(seed)
    prompts, logits, continuations = [], [], []
    for length in lengths:
        for _ in range(20):
            prompt = [rng.randrange(config.get_text_config().vocab_size) for _ in range(length)]
            values, new, gap = answers(model, prompt)
            if gap > MIN_GAP:
                break
        else:
            raise NearTie(f"{folder.name}: no prompt of {length} tokens without a near tie")
        prompts.append(prompt)
        logits.append(values)
        continuations.append(new)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    padded = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    np.savez_compressed(
        folder / "answers.npz",
        prompts=padded,
        lengths=np.array(lengths, np.int32),
        continuations=np.array(continuations, np.int32),
        logits=np.concatenate(logits).astype(np.float32),
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    spread = np.concatenate(logits).std()
    print(f"{folder.name:32} {size / 1024:6.0f} KiB   logits std {spread:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, help="this family only")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=GOLDENS, metavar="NAME", help="these only")
    which.add_argument("--random", type=int, default=0, help="random variants per family")
    parser.add_argument("--seed", type=int, default=0, help="of the random variants")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--published", type=Path, help="checkout of ArcticTraining")
    args = parser.parse_args()
    register(args.published)
    torch.set_num_threads(1)
    families = [args.family] if args.family else list(FAMILIES)
    if not args.random:
        names = [n for n in args.only or GOLDENS if GOLDENS[n]["family"] in families]
        if not names:
            parser.error(f"golden_variants.py has none of these of family {args.family}")
        for name in names:
            make(args.out / name, GOLDENS[name], (1, 2, 9, 70))
        return
    for family in families:
        for index in range(args.random):
            seed = args.seed * 1000 + index
            variant = random_variant(family, random.Random(f"{family} {seed}"))
            print(variant)
            shard = "20KB" if index % 3 == 0 else None
            try:
                make(args.out / f"{family}_{seed}", variant, (1, 5, 66), shard)
            except NearTie as error:
                print(error)


if __name__ == "__main__":
    main()
