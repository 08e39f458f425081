"""Makes tiny random models with transformers, and what they answer, for test_parity.py.

    python -m tests.parity.make_goldens                              rewrite the committed goldens
    python -m tests.parity.make_goldens --random 5 --seed 7 --out D  others, of random shapes, into D

Needs the extra `parity` (torch on a CPU, transformers 5). Every parameter is redrawn, because the
usual initial values (ones, zeros, arange) hide most mistakes. Logits come from whole forward passes in
float32 without a cache and without padding. Where transformers departs from the published models it is
set straight here: nemotron_h raises the step size to `time_step_min` and leaves `time_step_limit`
aside; `follow_published_limits` gives every mixer the limits of its config.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent / "goldens"
NUM_NEW = 32
MIN_GAP = 5e-3  # between the two best logits of every greedy step: ten times the tolerance
INFINITY = float("inf")

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mamba2": (transformers.Mamba2Config, transformers.Mamba2ForCausalLM),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
    ),
}
M, A = "linear_attention", "full_attention"

GOLDENS = {
    "llama_linear_biases_tied": dict(
        family="llama",
        vocab_size=97,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=3e-4,
        rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=3000.0),
    ),
    "llama_llama3": dict(
        family="llama",
        vocab_size=83,
        hidden_size=48,
        intermediate_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        eos_token_id=[5, 9],
    ),
    "mamba2_groups_limits": dict(
        family="mamba2",
        vocab_size=97,
        hidden_size=36,
        num_hidden_layers=3,
        num_heads=9,
        head_dim=8,
        state_size=12,
        n_groups=3,
        conv_kernel=4,
        expand=2,
        time_step_limit=[0.02, 0.6],
        residual_in_fp32=False,
        layer_norm_epsilon=2e-4,
    ),
    "mamba2_biases_tied": dict(
        family="mamba2",
        vocab_size=101,
        hidden_size=30,
        num_hidden_layers=2,
        num_heads=5,
        head_dim=12,
        state_size=7,
        n_groups=1,
        conv_kernel=3,
        expand=2,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "nemotron_h_dense": dict(
        family="nemotron_h",
        vocab_size=89,
        hidden_size=40,
        layers_block_type=[M, "mlp", M, A, "mlp", M, "mlp"],
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        intermediate_size=44,
        mamba_num_heads=6,
        mamba_head_dim=8,
        ssm_state_size=9,
        n_groups=3,
        conv_kernel=4,
    ),
    "nemotron_h_biases_limits": dict(
        family="nemotron_h",
        vocab_size=79,
        hidden_size=32,
        layers_block_type=[A, M, "mlp", M, M],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=36,
        mamba_num_heads=5,
        mamba_head_dim=14,
        ssm_state_size=8,
        n_groups=1,
        conv_kernel=2,
        use_bias=True,
        use_conv_bias=False,
        mlp_bias=True,
        time_step_limit=[0.01, 0.9],
        layer_norm_epsilon=1e-3,
    ),
    "nemotron_h_moe_groups": dict(
        family="nemotron_h",
        vocab_size=91,
        hidden_size=36,
        layers_block_type=[M, "moe", A, "moe", M, "mlp"],
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=8,
        intermediate_size=30,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=10,
        n_groups=2,
        conv_kernel=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=14,
        moe_shared_expert_intermediate_size=22,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "nemotron_h_moe_latent_biases": dict(
        family="nemotron_h",
        vocab_size=90,
        hidden_size=32,
        layers_block_type=["moe", M, A, M, "moe"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=18,
        mamba_num_heads=7,
        mamba_head_dim=8,
        ssm_state_size=11,
        n_groups=1,
        conv_kernel=5,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=15,
        moe_shared_expert_intermediate_size=17,
        moe_latent_size=12,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        mlp_bias=True,
    ),
    "bamba_biases_tied": dict(
        family="bamba",
        vocab_size=93,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=5,
        attn_layer_indices=[1, 4],
        num_attention_heads=3,
        num_key_value_heads=1,
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_d_conv=4,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=700.0),
    ),
    "bamba_quarter_limits": dict(
        family="bamba",
        vocab_size=85,
        hidden_size=40,
        intermediate_size=44,
        num_hidden_layers=3,
        attn_layer_indices=[2],
        num_attention_heads=5,
        num_key_value_heads=5,
        mamba_n_heads=5,
        mamba_d_head="auto",
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=3,
        time_step_limit=[0.03, 0.4],
        rope_parameters=dict(rope_type="default", rope_theta=2e4, partial_rotary_factor=0.25),
    ),
    "granite_dense_rope_biases": dict(
        family="granitemoehybrid",
        vocab_size=95,
        hidden_size=42,
        intermediate_size=20,
        shared_intermediate_size=34,
        num_local_experts=0,
        num_hidden_layers=4,
        layer_types=[M, A, M, A],
        num_attention_heads=3,
        num_key_value_heads=1,
        mamba_n_heads=6,
        mamba_d_head=14,
        mamba_n_groups=2,
        mamba_d_state=9,
        mamba_d_conv=4,
        mamba_proj_bias=True,
        attention_bias=True,
        position_embedding_type="rope",
        rope_parameters=dict(rope_type="default", rope_theta=900.0),
        embedding_multiplier=3.1,
        residual_multiplier=0.61,
        attention_multiplier=0.17,
        logits_scaling=0.45,
    ),
    "granite_moe_nope_tied": dict(
        family="granitemoehybrid",
        vocab_size=88,
        hidden_size=40,
        intermediate_size=18,
        shared_intermediate_size=26,
        num_local_experts=6,
        num_experts_per_tok=3,
        num_hidden_layers=4,
        layer_types=[M, M, A, M],
        num_attention_heads=5,
        num_key_value_heads=1,
        mamba_n_heads=8,
        mamba_d_head=10,
        mamba_n_groups=1,
        mamba_d_state=12,
        mamba_d_conv=2,
        mamba_conv_bias=False,
        position_embedding_type="nope",
        tie_word_embeddings=True,
        time_step_limit=[0.01, 0.7],
        embedding_multiplier=0.8,
        residual_multiplier=0.37,
        attention_multiplier=0.31,
        logits_scaling=0.6,
    ),
}


class NearTie(RuntimeError):
    """A model whose greedy continuations hang on differences too small to compare."""


def random_variant(family: str, rng: random.Random) -> dict:
    """Keyword arguments of a config of odd shape."""
    pick = rng.choice
    heads, kv = pick([(1, 1), (3, 1), (3, 3), (4, 2), (6, 3), (6, 2), (5, 5), (7, 1)])
    head_dim = pick([8, 16, 24])
    groups = pick([1, 1, 2, 3])
    limits = pick([[0.0, INFINITY], [0.0, INFINITY], [0.02, 0.5], [0.0, 0.3]])
    per_group, ssm_dim = pick([1, 2, 3]), pick([4, 8, 12])
    ssm_heads = groups * per_group
    flag = lambda: rng.random() < 0.5
    common = dict(
        family=family,
        vocab_size=rng.randrange(61, 131),
        tie_word_embeddings=flag(),
    )
    mixed = dict(num_attention_heads=heads, num_key_value_heads=kv)
    num_layers = rng.randrange(2, 6)
    kinds = [pick([M, M, A]) for _ in range(num_layers)]
    eps = pick([1e-6, 1e-5, 1e-3])
    rope = pick(
        [
            dict(rope_type="default", rope_theta=pick([1e4, 5e5, 123.0])),
            dict(rope_type="linear", rope_theta=pick([1e4, 321.0]), factor=pick([2.0, 3.7])),
            dict(
                rope_type="llama3",
                rope_theta=pick([1e4, 500.0]),
                factor=pick([8.0, 2.5]),
                low_freq_factor=pick([1.0, 1.5]),
                high_freq_factor=pick([4.0, 3.0]),
                original_max_position_embeddings=pick([16, 64]),
            ),
        ]
    )
    if family == "llama":
        return (
            common
            | mixed
            | dict(
                hidden_size=heads * pick([8, 10, 12]),
                head_dim=head_dim,
                intermediate_size=rng.randrange(20, 70),
                num_hidden_layers=num_layers,
                attention_bias=flag(),
                mlp_bias=flag(),
                rms_norm_eps=eps,
                rope_parameters=rope,
            )
        )
    if family == "mamba2":
        expand = pick([1, 2, 4])
        ssm_dim = 4 * pick([1, 2, 4])
        return common | dict(
            hidden_size=ssm_heads * ssm_dim // expand,
            expand=expand,
            num_heads=ssm_heads,
            head_dim=ssm_dim,
            n_groups=groups,
            state_size=pick([5, 8, 16, 31]),
            conv_kernel=rng.randrange(2, 6),
            num_hidden_layers=num_layers,
            use_bias=flag(),
            use_conv_bias=flag(),
            residual_in_fp32=flag(),
            time_step_limit=limits,
            layer_norm_epsilon=eps,
            chunk_size=pick([4, 16, 64]),
        )
    if family == "nemotron_h":
        experts, expert_groups, top_groups, top_k = pick(
            [(4, 1, 1, 1), (4, 1, 1, 4), (6, 3, 2, 3), (8, 2, 1, 4), (8, 4, 3, 2), (7, 1, 1, 3)]
        )
        return (
            common
            | mixed
            | dict(
                hidden_size=rng.randrange(24, 50),
                head_dim=head_dim,
                layers_block_type=[pick([M, M, A, "mlp", "moe", "moe"]) for _ in range(num_layers)],
                intermediate_size=rng.randrange(20, 70),
                mamba_num_heads=ssm_heads,
                mamba_head_dim=ssm_dim,
                ssm_state_size=pick([5, 8, 16, 31]),
                n_groups=groups,
                conv_kernel=rng.randrange(2, 6),
                use_bias=flag(),
                use_conv_bias=flag(),
                mlp_bias=flag(),
                attention_bias=flag(),
                time_step_limit=limits,
                layer_norm_epsilon=eps,
                chunk_size=pick([4, 16, 64]),
                n_routed_experts=experts,
                num_experts_per_tok=top_k,
                n_group=expert_groups,
                topk_group=top_groups,
                moe_intermediate_size=rng.randrange(8, 30),
                moe_shared_expert_intermediate_size=rng.randrange(8, 30),
                moe_latent_size=pick([None, 10, 21]),
                norm_topk_prob=flag(),
                routed_scaling_factor=pick([1.0, 2.5]),
            )
        )
    hidden = heads * pick([8, 16, 24])
    groups = groups if 2 * hidden % groups == 0 else 1
    ssm_heads = next(h for h in (groups * 4, groups * 2, groups) if 2 * hidden % h == 0)
    both = (
        common
        | mixed
        | dict(
            hidden_size=hidden,
            intermediate_size=rng.randrange(20, 70),
            num_hidden_layers=num_layers,
            mamba_n_heads=ssm_heads,
            mamba_d_head=pick(["auto", 2 * hidden // ssm_heads]),
            mamba_n_groups=groups,
            mamba_d_state=pick([5, 8, 16, 31]),
            mamba_d_conv=rng.randrange(2, 6),
            mamba_conv_bias=flag(),
            mamba_proj_bias=flag(),
            mamba_chunk_size=pick([4, 16, 64]),
            attention_bias=flag(),
            rms_norm_eps=eps,
            time_step_limit=limits,
            rope_parameters=rope,
        )
    )
    if family == "bamba":
        return both | dict(
            attn_layer_indices=[i for i, kind in enumerate(kinds) if kind == A] or None,
            mlp_bias=flag(),
            rope_parameters=rope | dict(partial_rotary_factor=pick([0.25, 0.5, 0.5, 1.0])),
        )
    experts = pick([0, 0, 3, 5])
    return both | dict(
        layer_types=kinds,
        shared_intermediate_size=rng.randrange(10, 40),
        num_local_experts=experts,
        num_experts_per_tok=pick([1, 2, experts]) if experts else 2,
        position_embedding_type=pick(["nope", None, "rope"]),
        embedding_multiplier=pick([1.0, 12.0, 0.7]),
        residual_multiplier=pick([1.0, 0.22, 0.6]),
        attention_multiplier=pick([1.0, 0.125, 0.03]),
        logits_scaling=pick([1.0, 8.0, 0.4]),
    )


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
        elif last == "dt_bias":
            uniform(tensor, -5.0, 2.0)
        elif last == "D":
            normal(tensor, 0.0, 1.0)
        elif last == "e_score_correction_bias":
            normal(tensor, 0.0, 0.5)
        elif last == "bias":
            normal(tensor, 0.0, 0.4)
        elif tensor.ndim == 1:
            normal(tensor, 1.0, 0.3)
        elif "conv1d" in name:
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
    tokens, gap = list(prompt), INFINITY
    for _ in range(NUM_NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        gap = min(gap, float(best[0] - best[1]))
        tokens.append(int(logits.argmax()))
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().numpy(), tokens[len(prompt) :], gap


def make(
    folder: Path, variant: dict, seed: int, lengths: tuple[int, ...], shard: str | None = None
):
    """Writes one model and its answers; takes other prompts until no greedy step is a near tie."""
    fields = dict(variant)
    config_class, model_class = CLASSES[fields.pop("family")]
    fields = {"max_position_embeddings": 512, "chunk_size": 16, "mamba_chunk_size": 16} | fields
    known = set(config_class().to_dict())
    fields = {k: v for k, v in fields.items() if k in known or k in ("tie_word_embeddings",)}
    config = config_class(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config).float().eval()
    redraw(model, seed)
    follow_published_limits(model)
    rng = random.Random(seed)
    prompts, logits, continuations = [], [], []
    for length in lengths:
        for _ in range(20):
            prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
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
    parser.add_argument("--random", type=int, default=0, help="random variants per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.random:
        for index, (name, variant) in enumerate(GOLDENS.items()):
            make(args.out / name, variant, 1000 + index, (1, 2, 9, 70))
        return
    for family in CLASSES:
        for index in range(args.random):
            seed = args.seed * 1000 + index
            variant = random_variant(family, random.Random(f"{family} {seed}"))
            print(variant)
            shard = "20KB" if index % 3 == 0 else None
            try:
                make(args.out / f"{family}_{seed}", variant, seed, (1, 5, 66), shard)
            except NearTie as error:
                print(error)


if __name__ == "__main__":
    main()
