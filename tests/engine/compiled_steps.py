"""Steps of tiny models as XLA compiles them, and what their texts say."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import jax
import numpy as np

from hybrid_jax.config import (
    MLP,
    Attention,
    CacheConfig,
    EngineConfig,
    GatedDelta,
    Mamba1,
    Mamba2,
    ModelConfig,
    ShortConv,
    SpeculationConfig,
    residual_layer,
    with_cut,
)
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.engine.adjust import Adjust
from hybrid_jax.engine.kernel_choice import choose_kernels
from hybrid_jax.engine.runner import Runner
from hybrid_jax.geometry import (
    make_geometry,
)
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.bucket import COPIED_FRAMES, SLOT_WRITES
from hybrid_jax.sizing.devices import Device
from hybrid_jax.state import State
from tests.kinds import fixed_decay, gated, latent
from tests.kinds.fixed_decay import FixedDecay
from tests.kinds.gated import Gated
from tests.kinds.latent import Latent

fixed_decay.register()
gated.register()
latent.register()

# A prime, so that a shape tells what it is, and so large that a byte of each frame is more than all temporaries.
FRAMES = 1_000_000_007


def model(pattern: str, dtype: str) -> ModelConfig:
    """The bundled model's widths with other layers: M, A, or both side by side in either order, P and Q. N and B have
    other shapes than M and A. D is a gated delta net, G has a gate, S caches columns alone, J and C carry their state.
    L keeps one latent vector of a token. F has fixed decays, and no convolution. R and T have S beside D and beside A.
    V and W have a layer with a window beside A and beside L.
    | and ! are a cut; after !, each two layers share keys and values, or a state."""
    mamba2 = Mamba2(num_heads=6, head_dim=64, state_size=64)
    attention = Attention(num_heads=3, num_kv_heads=1, head_dim=64)
    mixers = {
        **{"M": (mamba2,), "A": (attention,), "P": (mamba2, attention), "Q": (attention, mamba2)},
        "N": (Mamba2(num_heads=5, head_dim=64, state_size=48, num_groups=5),),
        "B": (Attention(num_heads=2, num_kv_heads=2, head_dim=96),),
        "D": (GatedDelta(num_key_heads=2, num_value_heads=6, key_dim=64, value_dim=64),),
        "G": (replace(attention, gate=True, qk_norm=True, float32_norms=True),),
        "S": (ShortConv(size=192),),
        "J": (Mamba1(inner_size=384, state_size=64, dt_rank=12),),
        "C": (Gated(num_blocks=6, block_size=4096),),
        "L": (Latent(num_heads=3, head_dim=64, rank=96),),
        "F": (FixedDecay(num_heads=6, value_dim=64, key_dim=48),),
    }
    near = replace(attention, sliding_window=100)
    mixers |= {"V": (attention, near), "W": (near, *mixers["L"])}
    mixers |= {"R": mixers["S"] + mixers["D"], "T": mixers["S"] + mixers["A"]}
    before, sign, after = re.fullmatch(r"(\w+)([|!]?)(\w*)", pattern).groups()
    config = ModelConfig(
        family="test",
        vocab_size=260,
        width=192,
        layers=tuple(
            residual_layer(mixers=mixers[kind], mlp=MLP(width=512)) for kind in before + after
        ),
        tie_embeddings=True,
        max_position=16384,  # 256 pages of 64 tokens
        dtype=dtype,
    )
    group = 1 + (sign == "!")
    return with_cut(config, len(before), kv_group=group, state_group=group)


def make_runner(
    pattern: str = "MAM",
    dtype: str = "float32",
    exact: bool = False,
    page_tokens: int | None = None,
    max_model_len: int | None = None,
    max_rows: int = 8,
    speculation: SpeculationConfig | None = None,
    drafting: str | None = None,
    checkpoints: str = "float32",
) -> Runner:
    fp8, dtype = dtype == "fp8", "float32" if dtype == "fp8" else dtype
    config = model(pattern, dtype)
    method = None if speculation is None else speculation.method
    if method == "exit":
        config = replace(config, exit_head=True)
    if method == "mtp":
        config = replace(config, mtp=model(drafting or DRAFTING[method], dtype).layers)
    if method == "draft":
        config = replace(config, draft=model(drafting or DRAFTING[method], dtype))
    engine = EngineConfig(
        max_rows=max_rows,
        dtype=dtype,
        kv_cache_dtype="fp8" if fp8 else "auto",
        exact=exact,
        page_tokens=page_tokens,
        speculation=speculation,
        cache=CacheConfig(checkpoints=checkpoints),
    )
    params = jax.eval_shape(lambda: random_params(config, 0, dtype))
    longest = max_model_len or config.max_position
    sizes = {"num_frames": 2, "max_slots": 67, "max_model_len": longest}
    geometry = make_geometry(config, engine)
    kernels = choose_kernels(config, geometry, engine, Device())
    return Runner(config, params, engine, geometry, **sizes, kernels=kernels)


def struct(*shape: int, dtype=np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def state_struct(runner: Runner, num_frames: int) -> State:
    words = runner.specs.arena.shape[1]
    specs = runner.specs.replace(arena=ArraySpec((num_frames, words), "uint32"))
    return jax.tree.map(lambda spec: struct(*spec.shape, dtype=spec.dtype), specs)


@dataclass
class Program:
    """One compiled step: what it donates, the compiler's byte counts, and its instructions."""

    state: State
    adjust: Adjust | None
    aliased_bytes: int
    temp_bytes: int
    text: str

    def results(self, leaf: jax.ShapeDtypeStruct) -> list[str]:
        """Opcodes of instructions whose result is one array as large as `leaf`, whatever its dtype or shape."""
        found, size = [], math.prod(leaf.shape)
        for shape, opcode in re.findall(
            r"^\s*(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", self.text, re.M
        ):
            if math.prod(int(n) for n in shape.split(",")) == size:
                found.append(opcode)
        return found


def mistakable(text: str) -> list[set[str]]:
    """Kinds of names in one fusion that XLA's CPU compiler may take for one another; see test_fusion_names.py."""
    found: list[set[str]] = []
    for fusion in re.findall(r"^%\S*fused\S* \([^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        names = re.findall(r"^\s+(?:ROOT )?%(\S+) = ", fusion, re.M)
        kinds: dict[str, set[str]] = {}
        for kind in {re.sub(r"(\.(\d+|clone|remat\d*))+$", "", name) for name in names}:
            kinds.setdefault(re.sub("[-.]", "_", kind), set()).add(kind)
        found += [same for same in kinds.values() if len(same) > 1]
    return found


def adjust_struct(runner: Runner) -> Adjust:
    shape = (runner.engine.max_rows + 1, runner.model.config.vocab_size)
    return Adjust(counts=struct(*shape), bias=struct(*shape, dtype=np.float32))


def arguments(runner: Runner, num_frames: int, kind: str, *key) -> tuple:
    """Abstract arguments of an executable; what is donated comes in `Program.donated`."""
    state = state_struct(runner, num_frames)
    if kind == "move_row":
        return state, struct(), struct()
    if kind == "load_history":
        return state, struct(), struct(state.drafting["history"].shape[1])
    if kind == "write_slots":
        return state, struct(SLOT_WRITES), struct(SLOT_WRITES, runner.model.geometry.state_frames)
    if kind in ("narrow_checkpoint", "widen_checkpoint"):
        wide, narrow = runner.model.geometry.checkpoint_frames
        return state, struct(wide if kind == "narrow_checkpoint" else narrow)
    if kind == "write_checkpoint":
        return state, struct(*key), struct(*key, state.arena.shape[1], dtype=np.uint32)
    if kind in ("save_frames", "load_frames"):
        words = [struct(state.arena.shape[1], dtype=np.uint32)] * COPIED_FRAMES
        return state, struct(COPIED_FRAMES), *(words if kind == "load_frames" else [])
    shape, variant = key
    adjust = adjust_struct(runner) if variant.adjusts else None
    size = runner.programs.layout(kind, shape, adjusts=variant.adjusts).size
    step = next(step for step in runner.kinds if step.name == kind)
    rest = [struct(*x.shape, dtype=x.dtype) for x in step.inert(shape)]
    if kind == "fork":
        return state, adjust, struct(runner.engine.max_rows, size), *rest
    return runner.params, state, adjust, struct(shape.rows, size), *rest


def shape_of(runner: Runner, kind: str, rows: int, tokens: int | None = None):
    """The first bucket of a kind with so many rows and, if asked for, tokens."""
    return next(
        shape
        for step in runner.kinds
        for shape in step.buckets()
        if type(shape).__name__.lower().startswith(kind)
        and shape.rows == rows
        and tokens in (None, getattr(shape, "tokens", None))
    )


def compile_step(runner: Runner, kind: str, *key) -> Program:
    args = arguments(runner, FRAMES, kind, *key)
    state = next(arg for arg in args if isinstance(arg, State))
    adjust = next((arg for arg in args if isinstance(arg, Adjust)), None)
    # Buffers are settled before LLVM, whose own optimisation would take most of the time.
    quick = {"xla_backend_optimization_level": 0}
    compiled = runner.programs.get(kind, *key).lower(*args).compile(compiler_options=quick)
    memory = compiled.memory_analysis()
    return Program(
        state=state,
        adjust=adjust,
        aliased_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        text=compiled.as_text(),
    )


SPECULATION = SpeculationConfig(num_tokens=3)
HEAD, SECOND, EXIT = (replace(SPECULATION, method=method) for method in ("mtp", "draft", "exit"))

# What the layers are that draft, by the method.
DRAFTING = {"mtp": "A", "draft": "MJA"}
