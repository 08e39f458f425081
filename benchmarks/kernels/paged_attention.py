"""Attention over pages: decode, verification of drafts, and prefill, at 32 query and 8 KV heads of 128.

    python -m benchmarks.kernels.paged_attention [--smoke] [--cases decode_64x8k] [--sweep] [--out FILE]

Sides read pages of 64 tokens in shuffled frames. Peers read contiguous K and V, which the table says: torch's SDPA
with its flash and cuDNN backends, flash_attn and its version for Hopper, jax's cuDNN attention; flashinfer reads pages
too, in order. Rows with a window have no peers; beside them stands XLA's walk over every tile, in which rows far on
make all others go as far.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, paged_attention
from pallas_kernels.paged_attention.kernel import paged_attention_pallas
from pallas_kernels.paged_attention.layout import pack
from pallas_kernels.paged_attention.plan import Config
from tests.kernels.attention_cases import every_tile
from tests.kernels.cases import paged_attention as shapes

PAGE_TOKENS, SCALE = 64, 128**-0.5
CONTIGUOUS = "contiguous K and V"
# The reference gathers all pages to float32 and makes all scores at once.
MOST_GATHERED, MOST_SCORES = 2.5e9, 1e9  # bytes
DECODE_SWEEP = [
    Config(
        block_q=64, block_k=block_k, num_warps=warps, num_stages=stages, programs_per_sm=programs
    )
    for block_k in (32, 64)
    for warps in (2, 4, 8)
    for stages in (2, 3, 5)
    for programs in (4, 8)
]
PREFILL_SWEEP = [
    Config(block_q=block_q, block_k=block_k, num_warps=warps, num_stages=stages, programs_per_sm=1)
    for block_q in (64, 128)
    for block_k in (32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3, 4)
]


def shape_of(name: str, rows: int, tokens: int, context: int) -> shapes.Case:
    """Rows whose last new token is the last of `context` positions."""
    return shapes.Case(
        name=name,
        tokens=tokens,
        base=(context - tokens,) * rows,
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_tokens=PAGE_TOKENS,
        pages=context // PAGE_TOKENS,
    )


K = 1024
CASES = (
    shape_of("decode_64x8k", 64, 1, 8 * K),
    shape_of("prefill_8k", 1, 8 * K, 8 * K),
    shape_of("verify_T5_64x8k", 64, 5, 8 * K),
    shape_of("decode_8x8k", 8, 1, 8 * K),
    shape_of("decode_1x8k", 1, 1, 8 * K),
    shape_of("prefill_2k", 1, 2 * K, 2 * K),
    shape_of("prefill_32k", 1, 32 * K, 32 * K),
    shape_of("decode_256x8k", 256, 1, 8 * K),
    shape_of("decode_64x2k", 64, 1, 2 * K),
    shape_of("decode_64x32k", 64, 1, 32 * K),
    shape_of("decode_1x32k", 1, 1, 32 * K),
    replace(shape_of("decode_4x16k_window", 4, 1, 16 * K), window=512),
    replace(  # one row far on, the others at their beginning
        shape_of("decode_16k_and_3x600_window", 4, 1, 16 * K),
        window=512,
        base=(16 * K - 1, *[600] * 3),
    ),
)


def context_of(shape: shapes.Case) -> int:
    return shape.pages * shape.page_tokens


def draw_contiguous(shape: shapes.Case, key: jax.Array):
    """q [B, T, N, H], and k and v [B, S, K, H], whose pages `draw_pages` makes of the same key."""
    kv_shape = (shape.rows, context_of(shape), shape.kv_heads, shape.head_dim)
    sizes = ((shape.rows, shape.tokens, shape.heads, shape.head_dim), kv_shape, kv_shape)
    q, k, v = (
        jax.random.normal(key, size, jnp.bfloat16)
        for key, size in zip(jax.random.split(key, 3), sizes, strict=True)
    )
    return (), {"q": q, "k": k, "v": v}


def draw_pages(shape: shapes.Case, key: jax.Array):
    """Arguments of `paged_attention`; nothing is carried, since attention only reads."""
    _, given = draw_contiguous(shape, key)
    kv = jnp.stack([given["k"], given["v"]], axis=2)
    layout, count = shape.layout("bfloat16"), shape.rows * shape.pages
    ids = 1 + jax.random.permutation(jax.random.fold_in(key, 3), count)
    arena = jnp.zeros((count + 1, layout.page_words), jnp.uint32)
    return (), {
        "q": given["q"],
        "arena": arena.at[ids].set(pack(kv, str(kv.dtype))[0].reshape(count, -1)),
        "table": ids.reshape(shape.rows, shape.pages),
        "base": jnp.asarray(shape.base, jnp.int32),
        "end": jnp.asarray(shape.lengths, jnp.int32),
    }


def options_of(shape: shapes.Case) -> AttentionOptions:
    return AttentionOptions(
        layout=shape.layout("bfloat16"),
        scale=SCALE,
        sliding_window=shape.window,
        dtype=jnp.dtype("bfloat16"),
    )


def run(shape: shapes.Case, implementation: str, carry, inputs):
    arrays, options = AttentionArrays(**inputs), options_of(shape)
    return paged_attention(arrays, options=options, implementation=implementation), carry


def run_every_tile(shape: shapes.Case, carry, inputs):
    arrays = AttentionArrays(**inputs | {"table": inputs["table"][:, None]})
    return every_tile(arrays, options=options_of(shape)), carry


def run_config(shape: shapes.Case, config: Config, carry, inputs):
    arrays = AttentionArrays(**inputs)
    return paged_attention_pallas(arrays, options=options_of(shape), config=config), carry


def jax_cudnn(shape: shapes.Case, carry, inputs):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    tokens, keys = q.shape[1], k.shape[1]
    mask = None
    if 1 < tokens < keys:
        mask = jnp.tril(jnp.ones((tokens, keys), bool), keys - tokens)[None, None]
    y = jax.nn.dot_product_attention(
        *(q, k, v), mask=mask, scale=SCALE, is_causal=tokens == keys, implementation="cudnn"
    )
    return y, carry


def torch_sdpa(backend: str, carry, inputs):
    torch, attention = need("torch"), need("torch.nn.attention")
    backend = getattr(attention.SDPBackend, backend)
    q, k, v = (x.transpose(1, 2) for x in to_torch(*(inputs[name] for name in "qkv")))
    tokens, keys = q.shape[2], k.shape[2]
    mask = None
    if 1 < tokens < keys:
        mask = need("torch.nn.attention.bias").causal_lower_right(tokens, keys)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call():
        with attention.sdpa_kernel(backend):
            y = sdpa(
                *(q, k, v), attn_mask=mask, is_causal=tokens == keys, scale=SCALE, enable_gqa=True
            )
        return y.transpose(1, 2)

    return call


def flash_attn(module: str, carry, inputs):
    package = need(module)
    q, k, v = to_torch(*(inputs[name] for name in "qkv"))
    if q.shape[1] == k.shape[1]:

        def call():
            y = package.flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True)
            return y[0] if isinstance(y, tuple) else y

        return call
    lengths = need("torch").full((q.shape[0],), k.shape[1], dtype=need("torch").int32).to(q.device)
    decode = package.flash_attn_with_kvcache
    return lambda: decode(q, k, v, cache_seqlens=lengths, softmax_scale=SCALE, causal=True)


def flashinfer(carry, inputs):
    package, torch = need("flashinfer"), need("torch")
    q, k, v = to_torch(*(inputs[name] for name in "qkv"))
    rows, tokens, heads, width = q.shape
    if tokens > 1:
        prefill = package.single_prefill_with_kv_cache
        return lambda: prefill(q[0], k[0], v[0], causal=True, sm_scale=SCALE)[None]
    kv_heads, pages = k.shape[2], k.shape[1] // PAGE_TOKENS
    caches = tuple(x.reshape(rows * pages, PAGE_TOKENS, kv_heads, width) for x in (k, v))
    room = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)  # zeros: its documentation
    decode = package.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    ids = functools.partial(torch.arange, dtype=torch.int32, device=q.device)
    decode.plan(
        *(ids(rows + 1) * pages, ids(rows * pages), ids(rows) * 0 + PAGE_TOKENS),
        *(heads, kv_heads, width, PAGE_TOKENS),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        sm_scale=SCALE,
    )
    return lambda: decode.run(q[:, 0], caches)[:, None]


def peers_of(shape: shapes.Case, draw) -> tuple[Peer, ...]:
    builds = {
        "torch sdpa flash": functools.partial(torch_sdpa, "FLASH_ATTENTION"),
        "torch sdpa cudnn": functools.partial(torch_sdpa, "CUDNN_ATTENTION"),
        "flash_attn": functools.partial(flash_attn, "flash_attn"),
        "flash_attn 3": functools.partial(flash_attn, "flash_attn_interface"),
    }
    found = [Peer(name=n, build=b, draw=draw, note=CONTIGUOUS) for n, b in builds.items()]
    if shape.tokens in (1, context_of(shape)):
        note = "pages, in order" if shape.tokens == 1 else CONTIGUOUS
        found.append(Peer(name="flashinfer", build=flashinfer, draw=draw, note=note))
    return tuple(found)


def work(shape: shapes.Case) -> Work:
    layout = shape.layout("bfloat16")
    queries = shape.rows * shape.tokens * shape.heads * shape.head_dim
    window = context_of(shape) if shape.window is None else shape.window
    seen = sum(min(base + 1 + t, window) for base in shape.base for t in range(shape.tokens))
    read = sum(min(length, window + shape.tokens - 1) for length in shape.lengths)
    return Work(
        bytes=read * 4 * layout.token_words + 2 * 2 * queries,
        flops=4.0 * seen * shape.heads * shape.head_dim,
        tokens=shape.rows * shape.tokens,
    )


def case_of(shape: shapes.Case, truth: str = "xla") -> Case:
    given = work(shape)
    names = ["pallas", "xla"]
    scores = 4 * shape.rows * shape.tokens * shape.heads * context_of(shape)
    if given.bytes <= MOST_GATHERED and scores <= MOST_SCORES:
        names.append("reference")
    calls = {name: functools.partial(run, shape, name) for name in names}
    sides = [Side(name=name, call=call) for name, call in calls.items()]
    draw = functools.partial(draw_contiguous, shape)
    if shape.window is None:
        cudnn = functools.partial(jax_cudnn, shape)
        sides.append(Side(name="jax cudnn", call=cudnn, draw=draw, note=CONTIGUOUS, gpu_only=True))
    else:
        sides.append(Side(name="xla every tile", call=functools.partial(run_every_tile, shape)))
    sweep = DECODE_SWEEP if shape.tokens <= 16 else PREFILL_SWEEP
    return Case(
        operation="paged_attention",
        name=f"{shape.name}_bf16",
        draw=functools.partial(draw_pages, shape),
        truth=calls[truth],
        sides=tuple(sides),
        peers=peers_of(shape, draw) if shape.window is None else (),
        configs={label(c): functools.partial(run_config, shape, c) for c in sweep},
        work=given,
    )


def label(config: Config) -> str:
    return (
        f"q {config.block_q} k {config.block_k} {config.num_warps}w {config.num_stages}s "
        f"{config.programs_per_sm}/SM"
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        small = next(shape for shape in shapes.CASES if shape.name == "decode")
        small = replace(small, pages=4, page_tokens=PAGE_TOKENS)
        last = context_of(small)
        decode = replace(small, base=(last - 1,) * 2)
        prefill = replace(small, name="prefill", pages=1, tokens=64, base=(0,))
        verify = replace(small, name="verify", tokens=5, base=(last - 5,) * 2)
        window = replace(decode, name="decode_window", base=(last - 1, 20), window=50)
        return [case_of(shape, "reference") for shape in (decode, verify, prefill, window)]
    return [case_of(shape) for shape in CASES]


if __name__ == "__main__":
    report.main("paged_attention", __doc__.splitlines()[0], cases)
