"""x times the transpose of weights [N, K] as they lie, such as embeddings that are the head, too.

A sum is a vector along K, whose lanes are summed at the end. Weights in other forms, such as codes with
scales along K, fit in here: a scheme says how their numbers are loaded (`load_along`), and how many at once (`along`).
"""

from __future__ import annotations

from hybrid_jax.products.cpu import jobs
from hybrid_jax.products.cpu.code import Code
from hybrid_jax.products.cpu.columns import LOCALITY, write_rows
from hybrid_jax.products.cpu.schemes import Scheme

BAND = 64  # rows of weights in a tile
MOST = 4  # rows of x at once
ALONG = 32  # K is a multiple of it


def tile_name(scheme: Scheme) -> str:
    """The name of the function that computes a tile."""
    return f"@tile_rows_{scheme.name}"


def at_once(scheme: Scheme) -> int:
    """Rows of weights at once."""
    return scheme.variant.sums // MOST


def functions(scheme: Scheme) -> list[str]:
    """All of a scheme but what makes y of its sums."""
    return [_dot(scheme, rows) for rows in (MOST, 1)] + [_tile(scheme)]


def cut(c: Code, scheme: Scheme, K: str, N: str, threads: str) -> tuple[str, str]:
    """Bands of rows of weights; K stays whole."""
    return c.max(c.div(N, BAND), 1), "1"


def _dot(scheme: Scheme, rows: int) -> str:
    """The products of some rows of x with some rows of weights."""
    variant, columns = scheme.variant, at_once(scheme)
    c = Code(
        f"define internal void @dot_{scheme.name}_{rows}(ptr %x, i64 %x_row, ptr %w, i64 %w_row, ptr %y, "
        "i64 %y_row, i64 %K)"
    )
    xs = [c.at("%x", c.mul("%x_row", m)) for m in range(rows)]
    ws = [c.at("%w", c.mul("%w_row", n)) for n in range(columns)]
    ahead = c.mul("%w_row", columns)  # the rows that come next, which lie in other pages of memory
    zeros = [(variant.vector, "zeroinitializer")] * (rows * columns)
    with c.loop("%K", zeros, step=scheme.along) as k:
        w_at, x_at = (
            c.mul(k.index, size) for size in (scheme.weight_bytes, scheme.x_bytes // scheme.span)
        )
        places = [c.at(w, w_at) for w in ws]
        weights = [scheme.load_along(c, place) for place in places]
        for place in places:
            c.do(
                f"call void @llvm.prefetch.p0(ptr {c.at(place, ahead)}, i32 0, i32 {LOCALITY}, i32 1)"
            )
        for m, x in enumerate(xs):
            value = scheme.x_along(c, c.at(x, x_at))
            for n, weight in enumerate(weights):
                i = m * columns + n
                k.next[i] = scheme.add(c, k.values[i], value, weight)
    for m in range(rows):
        y = c.at("%y", c.mul("%y_row", m))
        for n in range(columns):
            c.store("float", _sum(c, k.values[m * columns + n], variant.lanes), y, 4 * n, 4)
    c.do("ret void")
    return c.text()


def _sum(c: Code, vector: str, lanes: int) -> str:
    """The sum of all lanes, by halves."""
    kind, half = f"<{lanes} x float>", lanes
    while half > 1:
        half //= 2
        moved = c.shuffle("float", vector, "poison", [(i + half) % lanes for i in range(lanes)])
        vector = c.set(f"fadd {kind} {vector}, {moved}")
    return c.set(f"extractelement {kind} {vector}, i64 0")


def _tile(scheme: Scheme) -> str:
    """Band `t` of the rows of weights, for all rows of x."""
    c = Code(f"define internal void {tile_name(scheme)}(ptr %job, i64 %t, ptr %scratch)")
    M, K, N, bands, x, x_row, w_row, sum_row = (
        jobs.read(c, name) for name in ("M", "K", "N", "bands", "x", "x_row", "w_row", "sum_row")
    )
    columns = at_once(scheme)
    blocks, after = c.div(N, columns), c.add("%t", 1)
    begin = c.mul(c.div(c.mul(blocks, "%t"), bands), columns)
    end = c.mul(c.div(c.mul(blocks, after), bands), columns)
    wide = c.sub(c.select(c.is_("eq", after, bands), N, end), begin)
    w, last = c.at(jobs.read(c, "w"), c.mul(begin, w_row)), c.sub(wide, columns)
    with c.loop(wide, step=columns) as n:
        column = c.min(n.index, last)
        own, sums = c.at(w, c.mul(column, w_row)), c.at("%scratch", c.mul(column, 4))

        def call(row: str, rows: int) -> None:
            given, to = c.at(x, c.mul(row, x_row)), c.at(sums, c.mul(row, sum_row))  # noqa: B023
            c.do(
                f"call void @dot_{scheme.name}_{rows}(ptr {given}, i64 {x_row}, ptr {own}, i64 {w_row}, ptr {to}, "  # noqa: B023
                f"i64 {sum_row}, i64 {K})"
            )

        done = c.mul(c.div(M, MOST), MOST)
        with c.loop(done, step=MOST) as row:
            call(row.index, MOST)
        with c.loop(M, start=done) as row:
            call(row.index, 1)
    write_rows(c, M, N, "%scratch", sum_row, begin, wide)
    c.do("ret void")
    return c.text()
