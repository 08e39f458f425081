"""The whole text of a variant: for each kind of product a function that XLA calls, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_jax.products.cpu import columns, ffi, jobs, rows
from hybrid_jax.products.cpu.code import Code
from hybrid_jax.products.cpu.numbers import BYTES, spread, spread_name
from hybrid_jax.products.cpu.schemes import (
    Scheme,
    finish_columns,
    finish_name,
    finish_rows,
    scheme_for,
)
from hybrid_jax.products.cpu.variants import Variant

LAYOUTS = {"columns": columns, "rows": rows}
LAST = {"columns": finish_columns, "rows": finish_rows}
MESSAGES = {
    "bad_count": "number of arguments or results",
    "bad_shapes": "shapes",
    "bad_dtypes": "dtypes",
    "bad_version": "version of the foreign function interface",
    "no_memory": "no memory for the sums",
}
SPACE = (
    64  # bytes between rows of x; a power of two apart, they would share places in the first cache
)
# Of the C library. LLVM makes calls of the last two by itself.
IMPORTS = ("aligned_alloc", "free", "sched_yield", "memset", "memcpy")


@dataclass(frozen=True)
class Target:
    """A kind of product: weights [K, N] in "columns", or [N, K] in "rows"; with several matrices, of the one that an
    operand int32[1] names.

    Attributes:
        layout: as above. weights: "f32" or "bf16". chosen: there are several matrices.
    """

    layout: str
    weights: str
    chosen: bool = False

    @property
    def name(self) -> str:
        """Of its function, and part of the name by which XLA knows it."""
        return f"{self.layout}_{self.weights}{'_chosen' * self.chosen}"


TARGETS = tuple(Target(layout, weights) for layout in LAYOUTS for weights in BYTES) + tuple(
    Target("columns", weights, chosen=True) for weights in BYTES
)


def target_name(version: str, name: str) -> str:
    """The name of a product as XLA knows it. `version` is that of its code: other code has another name."""
    return f"hybrid_jax_{name}_{version}"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """When threads help. No bit of a product depends on it.

    Attributes:
        most_helpers: threads beside the caller's. alone_bytes: weights times rows, below which the caller works alone;
            it takes 10 microseconds to wake a thread.
    """

    most_helpers: int = 63
    alone_bytes: int = 1 << 20


SHARING = Sharing()


def source(variant: Variant, known: tuple[int, int], sharing: Sharing = SHARING) -> str:
    """All of a variant as text.

    Args:
        known: the version of XLA's interface.
    """
    parts = [_declarations(variant), *jobs.functions(_pause(variant))]
    used = {(layout, scheme_for(variant, x, w)) for layout in LAYOUTS for x in BYTES for w in BYTES}
    spreads = set()
    for layout, scheme in sorted(used, key=lambda each: (each[0], each[1].name)):
        parts += LAYOUTS[layout].functions(scheme)
        parts += [LAST[layout](scheme, out) for out in BYTES]
        spreads |= {(x, *_spread_of(layout, scheme)) for x in _rows_taken(scheme)}
    parts += [spread(*each) for each in sorted(spreads)]
    parts += [_handler(target, variant, known, sharing) for target in TARGETS]
    return "\n".join(parts)


def _rows_taken(scheme: Scheme) -> tuple[str, ...]:
    """Dtypes of x."""
    return ("bf16",) if scheme.takes == "bf16" else tuple(BYTES)


def _spread_of(layout: str, scheme: Scheme) -> tuple[str, int]:
    return scheme.takes, scheme.streams if layout == "columns" else 1


def _pause(variant: Variant) -> str:
    if variant.is_x86:
        return "call void @llvm.x86.sse2.pause()"
    return "call void @llvm.aarch64.hint(i32 1)"


def _declarations(variant: Variant) -> str:
    n = variant.lanes
    found = [
        "declare ptr @aligned_alloc(i64, i64)",
        "declare void @free(ptr)",
        "declare i32 @sched_yield()",
        "declare i64 @llvm.umin.i64(i64, i64)",
        "declare i64 @llvm.umax.i64(i64, i64)",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        f"declare <{n} x float> @llvm.fma.v{n}f32(<{n} x float>, <{n} x float>, <{n} x float>)",
        "declare void @llvm.x86.sse2.pause()"
        if variant.is_x86
        else "declare void @llvm.aarch64.hint(i32)",
    ]
    if variant.pairs:
        pair = f"<{2 * n} x bfloat>"
        found.append(
            f"declare <{n} x float> @llvm.x86.avx512bf16.dpbf16ps.{32 * n}(<{n} x float>, {pair}, {pair})"
        )
    for name, text in MESSAGES.items():
        said = f"products on a CPU: {text}"
        found.append(f'@{name} = internal constant [{len(said) + 1} x i8] c"{said}\\00"')
    return "\n".join(found) + "\n"


# --- what XLA calls -------------------------------------------------------------------------------


def _handler(target: Target, variant: Variant, known: tuple[int, int], sharing: Sharing) -> str:
    """`target(frame)`: checks what it is given, and makes a product. Nothing is read of what does not fit."""
    c = Code(f"define ptr @{target.name}(ptr %frame)")
    ffi.answer_metadata(c, known)
    with c.when(c.is_("ne", c.load("i32", "%frame", ffi.FRAME["stage"]), ffi.EXECUTE, "i32")):
        c.leave("ptr null")
    api = c.load("ptr", "%frame", ffi.FRAME["api"])
    for name, number in zip(("major", "minor"), known, strict=True):
        _demand(c, c.is_("eq", c.load("i32", api, ffi.API[name], 4), number, "i32"), "bad_version")
    count = 3 if target.chosen else 2
    _demand(c, _is(c, c.load("i64", "%frame", ffi.FRAME["num_arguments"]), count), "bad_count")
    _demand(c, _is(c, c.load("i64", "%frame", ffi.FRAME["num_results"]), 1), "bad_count")
    arguments = c.load("ptr", "%frame", ffi.FRAME["arguments"])
    given = [c.load("ptr", arguments, 8 * i) for i in range(count)]
    result = c.load("ptr", c.load("ptr", "%frame", ffi.FRAME["results"]))
    ranks = (2, 3, 1) if target.chosen else (2, 2)
    x, w, *which = (_Buffer(c, at, rank) for at, rank in zip(given, ranks, strict=True))
    y = _Buffer(c, result, 2)
    (M, K), (out_M, N) = x.dims, y.dims
    wanted = [K, N] if target.layout == "columns" else [N, K]
    for found, right in zip([out_M, *w.dims[-2:]], [M, *wanted], strict=True):
        _demand(c, _is(c, found, right), "bad_shapes")
    smallest = variant.block if target.layout == "columns" else rows.BAND
    _demand(c, c.is_("uge", N, smallest), "bad_shapes")
    divisor = 2 if target.layout == "columns" else rows.ALONG
    _demand(c, _is(c, c.set(f"urem i64 {K}, {divisor}"), 0), "bad_shapes")
    _demand(c, c.is_("ne", c.mul(M, K), 0), "bad_shapes")
    _demand(c, w.is_(target.weights), "bad_dtypes")
    weights = w.data
    for each in which:
        _demand(c, each.is_("s32"), "bad_dtypes")
        _demand(c, _is(c, each.dims[0], 1), "bad_shapes")
        weights = _chosen(c, each, w, c.mul(c.mul(K, N), BYTES[target.weights]))
    for x_dtype in BYTES:
        with c.when(x.is_(x_dtype)):
            _demand(c, y.is_(x_dtype), "bad_dtypes")
            sizes = _Sizes(M=M, K=K, N=N)
            scheme = scheme_for(variant, x_dtype, target.weights)
            job = _job(c, target.layout, scheme, sizes, x_dtype, sharing)
            for name, value in {"w": weights, "y": y.data}.items():
                jobs.write(c, name, value, job.name)
            _spread_rows(c, target.layout, scheme, sizes, x_dtype, x.data, job.name)
            c.do(f"call void @share(ptr {job.name}, ptr %frame, i64 {job.helpers})")
            c.leave("ptr null")
    c.do("br label %wrong")
    c.label("wrong")
    c.do("%error = call ptr @refuse(ptr %frame, ptr @bad_dtypes)")
    c.do("ret ptr %error")
    return c.text()


class _Buffer:
    """An array that XLA hands over; its rank is checked before its shape is read."""

    def __init__(self, c: Code, at: str, rank: int) -> None:
        self._code = c
        self._dtype, self.data = (
            c.load(k, at, ffi.BUFFER[n]) for k, n in (("i32", "dtype"), ("ptr", "data"))
        )
        _demand(c, _is(c, c.load("i64", at, ffi.BUFFER["rank"]), rank), "bad_shapes")
        dims = c.load("ptr", at, ffi.BUFFER["dims"])
        self.dims = [c.load("i64", dims, 8 * axis) for axis in range(rank)]

    def is_(self, dtype: str) -> str:
        return self._code.is_("eq", self._dtype, ffi.DTYPES[dtype], "i32")


@dataclass(frozen=True)
class _Sizes:
    M: str
    K: str
    N: str


@dataclass(frozen=True)
class _Job:
    """Names of a job and of the number of its helpers."""

    name: str
    helpers: str


def _is(c: Code, a: str, b: str | int) -> str:
    return c.is_("eq", a, b)


def _demand(c: Code, condition: str, message: str) -> None:
    with c.when(c.set(f"xor i1 {condition}, true")):
        c.leave(f"ptr {c.set(f'call ptr @refuse(ptr %frame, ptr @{message})')}")


def _chosen(c: Code, which: _Buffer, weights: _Buffer, size: str) -> str:
    """Where the chosen one of several matrices lies. A number that is none of them is that of the last one."""
    number = c.cast("zext", "i32", c.load("i32", which.data, align=4), "i64")
    return c.at(weights.data, c.mul(c.min(number, c.sub(weights.dims[0], 1)), size))


def _job(c: Code, layout: str, scheme: Scheme, sizes: _Sizes, dtype: str, sharing: Sharing) -> _Job:
    """Memory for a job, and all its fields but those that point to weights and results."""
    M, K, N = sizes.M, sizes.K, sizes.N
    threads = c.set("call i64 @threads(ptr %frame)")
    bands, parts = LAYOUTS[layout].cut(c, scheme, K, N, threads)
    tiles = c.mul(bands, parts)
    work = c.mul(c.mul(c.mul(K, N), scheme.weight_bytes), M)
    few = c.is_("ult", work, sharing.alone_bytes)
    helpers = c.min(c.sub(c.min(threads, tiles), 1), sharing.most_helpers)
    helpers = c.select(few, 0, helpers)
    # Sums of a tile: the widest one has one block more than others, and columns that make no block.
    widest = c.add(c.div(N, bands), 3 * scheme.variant.block)
    sum_row = c.rounded_up(c.mul(widest, 4), jobs.LINE)
    each = c.add(c.mul(M, sum_row), jobs.LINE)
    several = c.is_("ugt", parts, 1)
    all_sums = c.select(several, c.mul(c.mul(M, sum_row), tiles), c.mul(each, c.add(helpers, 1)))
    x_row = c.add(c.rounded_up(c.mul(K, BYTES[scheme.takes]), jobs.LINE), SPACE)
    x_bytes, head = c.mul(M, x_row), -(-jobs.JOB_BYTES // jobs.LINE) * jobs.LINE
    count_bytes = c.rounded_up(c.mul(bands, 8), jobs.LINE)
    size = c.add(c.add(c.add(all_sums, x_bytes), count_bytes), head + jobs.LINE)
    job = c.set(f"call ptr @aligned_alloc(i64 {jobs.LINE}, i64 {size})")
    _demand(c, c.is_("ne", job, "null", "ptr"), "no_memory")
    counters = c.at(job, c.add(x_bytes, head))
    shared = c.at(job, jobs.OFFSETS["taken"])
    c.do(f"call void @llvm.memset.p0.i64(ptr {shared}, i8 0, i64 {jobs.LINE * 3}, i1 false)")
    c.do(f"call void @llvm.memset.p0.i64(ptr {counters}, i8 0, i64 {count_bytes}, i1 false)")
    scratch = c.at(counters, count_bytes)
    fields: dict[str, str | int] = {
        "tile": LAYOUTS[layout].tile_name(scheme),
        "finish": finish_name(scheme, layout, dtype),
        "x": c.at(job, head),
        "scratch": scratch,
        "sums": scratch,
        "counters": counters,
        "tiles": tiles,
        "bands": bands,
        "parts": parts,
        "M": M,
        "K": K,
        "N": N,
        "x_row": x_row,
        "w_row": c.mul(N if layout == "columns" else K, scheme.weight_bytes),
        "y_row": c.mul(N, BYTES[dtype]),
        "sum_row": sum_row,
        "each": each,
    }
    for name, value in fields.items():
        jobs.write(c, name, value, job)
    return _Job(job, helpers)


def _spread_rows(
    c: Code, layout: str, scheme: Scheme, sizes: _Sizes, dtype: str, x: str, job: str
) -> None:
    """Rows of x go into the job, as the scheme takes them."""
    name = spread_name(dtype, *_spread_of(layout, scheme))
    to, x_row = jobs.read(c, "x", job), jobs.read(c, "x_row", job)
    with c.loop(sizes.M) as row:
        given = c.at(x, c.mul(row.index, c.mul(sizes.K, BYTES[dtype])))
        own = c.at(to, c.mul(row.index, x_row))
        c.do(f"call void {name}(ptr {given}, ptr {own}, i64 {sizes.K})")
