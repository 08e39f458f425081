"""Configs of random odd shapes, as transformers takes them."""

from __future__ import annotations

import math
import random

from tests.parity.golden_variants import A, M


def random_variant(family: str, rng: random.Random) -> dict:
    """Keyword arguments of a config of odd shape, and the family."""
    pick = rng.choice
    heads, kv = pick([(1, 1), (3, 1), (3, 3), (4, 2), (6, 3), (6, 2), (5, 5), (7, 1)])
    head_dim = pick([8, 16, 24])
    groups = pick([1, 1, 2, 3])
    limits = pick([[0.0, math.inf], [0.0, math.inf], [0.02, 0.5], [0.0, 0.3]])
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
    if family.startswith("qwen2") or family == "llama_swiftkv":
        sizes = dict(
            hidden_size=heads * pick([8, 10, 12]),
            intermediate_size=rng.randrange(20, 70),
            num_hidden_layers=num_layers,
            rms_norm_eps=eps,
            rope_parameters=rope,
        )
        if family == "qwen2":
            windows = dict(sliding_window=pick([5, 17, 40]), max_window_layers=pick([0, 1]))
            return common | mixed | sizes | windows | dict(use_sliding_window=flag())
        cut = rng.randrange(1, num_layers)
        group = pick([n for n in range(1, num_layers) if (num_layers - cut) % n == 0])
        sizes |= dict(num_key_value_layers=cut, key_value_group_size=group)
        biases = dict(attention_bias=flag()) if family == "llama_swiftkv" else {}
        return common | mixed | sizes | biases
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
    if family in ("mamba", "falcon_mamba"):
        stack = common | dict(
            hidden_size=rng.randrange(20, 50),
            num_hidden_layers=num_layers,
            state_size=pick([3, 8, 16]),
            conv_kernel=rng.randrange(2, 6),
            expand=pick([1, 2, 3]),
            time_step_rank=pick(["auto", 3, 7]),
            use_bias=flag(),
            use_conv_bias=flag(),
            residual_in_fp32=flag(),
            layer_norm_epsilon=eps,
        )
        return stack | (dict(mixer_rms_eps=eps) if family == "falcon_mamba" else {})
    if family == "jamba":
        experts, top_k = pick([(1, 1), (4, 1), (5, 5), (6, 2)])
        attention_period, expert_period = pick([1, 2, 3]), pick([1, 2, 3])
        return (
            common
            | mixed
            | dict(
                hidden_size=heads * pick([8, 12]),
                intermediate_size=rng.randrange(20, 50),
                num_hidden_layers=num_layers,
                attn_layer_period=attention_period,
                attn_layer_offset=rng.randrange(attention_period),
                expert_layer_period=expert_period,
                expert_layer_offset=rng.randrange(expert_period),
                num_experts=experts,
                num_experts_per_tok=top_k,
                mamba_d_state=pick([3, 8, 16]),
                mamba_d_conv=rng.randrange(2, 6),
                mamba_expand=pick([1, 2, 3]),
                mamba_dt_rank=pick(["auto", 3, 7]),
                mamba_conv_bias=flag(),
                mamba_proj_bias=flag(),
                rms_norm_eps=eps,
            )
        )
    if family in ("lfm2", "lfm2_moe"):
        lfm2 = (
            common
            | mixed
            | dict(
                hidden_size=heads * head_dim,
                layer_types=["conv" if kind == M else A for kind in kinds],
                num_hidden_layers=num_layers,
                intermediate_size=rng.randrange(20, 70),
                conv_bias=flag(),
                conv_L_cache=rng.randrange(2, 6),
                norm_eps=eps,
                rope_parameters=rope,
            )
        )
        if family == "lfm2":
            return lfm2 | dict(
                block_auto_adjust_ff_dim=flag(),
                block_multiple_of=pick([1, 8, 32]),
                block_ffn_dim_multiplier=pick([1.0, 1.3, 0.7]),
            )
        experts, top_k = pick([(4, 1), (5, 5), (6, 2), (8, 3)])
        return lfm2 | dict(
            num_dense_layers=rng.randrange(0, 3),
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=rng.randrange(8, 30),
            use_expert_bias=flag(),
            norm_topk_prob=flag(),
            routed_scaling_factor=pick([1.0, 2.5]),
        )
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        experts, top_k = pick([(4, 1), (5, 5), (6, 2), (8, 3)])
        qwen = (
            common
            | mixed
            | dict(
                hidden_size=rng.randrange(24, 50),
                head_dim=head_dim,
                layer_types=kinds,
                num_hidden_layers=num_layers,
                attention_bias=flag(),
                linear_num_key_heads=groups,
                linear_num_value_heads=ssm_heads,
                linear_key_head_dim=pick([4, 7, 16]),
                linear_value_head_dim=pick([3, 8, 12]),
                linear_conv_kernel_dim=rng.randrange(2, 6),
                rms_norm_eps=eps,
                rope_parameters=rope | dict(partial_rotary_factor=pick([0.25, 0.5, 1.0])),
            )
        )
        sparse = dict(
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=rng.randrange(8, 30),
            shared_expert_intermediate_size=rng.randrange(8, 30),
        )
        if family == "qwen3_5":
            dense = dict(intermediate_size=rng.randrange(20, 70))
            return qwen | dense | dict(model_type="qwen3_5_text")
        if family == "qwen3_5_moe":
            return qwen | sparse | dict(model_type="qwen3_5_moe_text")
        return (
            qwen
            | sparse
            | dict(
                intermediate_size=rng.randrange(20, 70),
                norm_topk_prob=flag(),
                decoder_sparse_step=pick([1, 2]),
                mlp_only_layers=[i for i in range(num_layers) if rng.random() < 0.3],
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
    if family == "falcon_h1":
        several = lambda count: [pick([1.0, 0.7, 1.6]) for _ in range(count)]
        names = (
            "lm_head",
            "embedding",
            "key",
            "attention_in",
            "attention_out",
            "ssm_in",
            "ssm_out",
        )
        inner = pick([None, ssm_heads * 4])
        return (
            both
            | {f"{name}_multiplier": pick([1.0, 0.6, 2.1]) for name in names}
            | dict(
                mamba_d_ssm=inner,
                mamba_d_head=pick(["auto", (inner or 2 * hidden) // ssm_heads]),
                mlp_multipliers=several(2),
                ssm_multipliers=several(5),
                mamba_rms_norm=flag(),
                mamba_norm_before_gate=flag(),
                projectors_bias=flag(),
                mlp_bias=flag(),
            )
        )
    if family == "bamba":
        return both | dict(
            attn_layer_indices=[i for i, kind in enumerate(kinds) if kind == A] or None,
            mlp_bias=flag(),
            rope_parameters=rope | dict(partial_rotary_factor=pick([0.25, 0.5, 0.5, 1.0])),
        )
    if family == "granitemoehybrid":
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
    raise ValueError(f"random_variants.py has no branch for family {family!r}")
