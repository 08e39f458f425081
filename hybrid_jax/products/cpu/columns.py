"""x times weights [K, N] as they lie: a step takes some rows of weights, and sums vectors of columns.

The rows of a unit of steps lie far apart. Two reads that go through the same page of memory would spoil what the
processor fetches ahead. x is put in the same order. So the order of a sum is fixed by K and N alone.
"""

from __future__ import annotations

from hybrid_jax.products.cpu import jobs
from hybrid_jax.products.cpu.code import Code
from hybrid_jax.products.cpu.schemes import Scheme

BAND = 4096  # columns that are summed side by side where there are enough of them
NARROWEST = 512  # columns of a band where there are many threads
MOST_PARTS = 4  # of K, that are summed apart
TILES = 16  # beyond which K is not cut
LOCALITY = 2  # the second cache


def row_counts(scheme: Scheme) -> tuple[int, ...]:
    """Rows of x at once, which add up to any number."""
    return (4, 2, 1) if scheme.variant.sums == 8 else (8, 4, 2, 1)


def tile_name(scheme: Scheme) -> str:
    """The name of the function that computes a tile."""
    return f"@tile_columns_{scheme.name}"


def functions(scheme: Scheme) -> list[str]:
    """All of a scheme but what makes y of its sums."""
    counts = row_counts(scheme)
    units = [_unit(scheme, rows, steps) for rows in counts for steps in (scheme.unroll, 1)]
    return [*units, _tile(scheme)]


def cut(c: Code, scheme: Scheme, K: str, N: str, threads: str) -> tuple[str, str]:
    """Bands of columns, and parts of K. Parts decide in which order is summed, so they ask for nothing but K and N."""
    wide = c.max(c.div(N, BAND), 1)
    parts = c.min(c.div(TILES, wide), MOST_PARTS)
    parts = c.max(c.min(parts, c.div(K, scheme.streams)), 1)
    enough = c.div(c.mul(threads, 2), parts)
    return c.max(wide, c.min(enough, c.div(N, NARROWEST))), parts


def _unit(scheme: Scheme, rows: int, steps: int) -> str:
    """Adds units of so many steps to the sums of some rows of x, for all columns of a tile.

    For many rows loops stay loops: of long straight code LLVM loads the numbers of all rows first, and spills them.
    """
    variant = scheme.variant
    c = Code(
        f"define internal void @unit_{scheme.name}_{rows}_{steps}(ptr %x, i64 %x_row, ptr %w, i64 %w_step, "
        "i64 %w_pair, i64 %w_unit, ptr %sums, i64 %sum_row, i64 %units, i64 %columns)"
    )
    vectors = max(2, min(4, variant.sums // rows))
    at_once = min(steps, max(1, scheme.unroll // rows))
    xs = [c.at("%x", c.mul("%x_row", m)) for m in range(rows)]
    totals = [c.at("%sums", c.mul("%sum_row", m)) for m in range(rows)]
    last, along = c.sub("%columns", variant.block), c.mul("%w_step", at_once)
    with c.loop("%columns", step=variant.block) as columns:
        # The last block lies over the one before it where columns do not come out even, with sums of its own.
        column = c.min(columns.index, last)
        slot = c.mul(columns.index, 4)
        for first in range(0, 4, vectors):
            w = c.at("%w", c.mul(c.add(column, first * variant.lanes), scheme.weight_bytes))
            places = [
                c.at(total, c.add(slot, 4 * variant.lanes * (first + v)))
                for total in totals
                for v in range(vectors)
            ]
            sums = [(variant.vector, c.load(variant.vector, place, align=4)) for place in places]
            with c.loop("%units", sums) as unit:
                w_unit = c.at(w, c.mul(unit.index, "%w_unit"))
                x_unit = c.mul(unit.index, steps * scheme.x_bytes)
                if at_once == steps:
                    x_own = [c.at(x, x_unit) for x in xs]
                    unit.next = _steps(c, scheme, w_unit, x_own, unit.values, steps)
                else:
                    carried = [(variant.vector, value) for value in unit.values]
                    with c.loop(steps // at_once, carried) as turn:
                        w_turn = c.at(w_unit, c.mul(turn.index, along))
                        offset = c.add(x_unit, c.mul(turn.index, at_once * scheme.x_bytes))
                        x_own = [c.at(x, offset) for x in xs]
                        turn.next = _steps(c, scheme, w_turn, x_own, turn.values, at_once)
                    unit.next = turn.values
            for value, place in zip(unit.values, places, strict=True):
                c.store(variant.vector, value, place, align=4)
    c.do("ret void")
    return c.text()


def _steps(
    c: Code, scheme: Scheme, w: str, xs: list[str], sums: list[str], steps: int
) -> list[str]:
    """Some steps in a row for all rows of x; returns the new sums."""
    sums, vectors = list(sums), len(sums) // len(xs)
    for step in range(steps):
        here = w if step == 0 else c.at(w, c.mul("%w_step", step))
        weights = scheme.load(c, here, vectors)
        for row in [here] if scheme.span == 1 else [here, c.at(here, "%w_pair")]:
            wide = vectors * scheme.variant.lanes * scheme.weight_bytes
            for byte in range(0, wide, jobs.LINE):
                place = c.at(row, byte + scheme.ahead)
                c.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {LOCALITY}, i32 1)")
        for m, x in enumerate(xs):
            value = scheme.spread(c, x if step == 0 else c.at(x, step * scheme.x_bytes))
            for v in range(vectors):
                i = m * vectors + v
                sums[i] = scheme.add(c, sums[i], value, weights[v])
    return sums


def _tile(scheme: Scheme) -> str:
    """Part `t % parts` of K for band `t / parts` of columns. Who ends the last part of a band sums all its parts."""
    c = Code(f"define internal void {tile_name(scheme)}(ptr %job, i64 %t, ptr %scratch)")
    block = scheme.variant.block
    M, K, N, bands, parts, sum_row = (
        jobs.read(c, name) for name in ("M", "K", "N", "bands", "parts", "sum_row")
    )
    band, part = c.div("%t", parts), c.set(f"urem i64 %t, {parts}")
    blocks = c.div(N, block)
    begin = c.mul(c.div(c.mul(blocks, band), bands), block)
    after = c.add(band, 1)
    end = c.mul(c.div(c.mul(blocks, after), bands), block)
    columns = c.sub(c.select(c.is_("eq", after, bands), N, end), begin)
    size, several = c.mul(M, sum_row), c.is_("ugt", parts, 1)
    own = c.at(jobs.read(c, "sums"), c.mul("%t", size))
    sums = c.select(several, own, "%scratch", "ptr")
    c.do(f"call void @llvm.memset.p0.i64(ptr {sums}, i8 0, i64 {size}, i1 false)")
    _sum_part(c, scheme, sums, K, begin, columns, part, parts)
    with c.when(several):
        counter = c.at(jobs.read(c, "counters"), c.mul(band, 8))
        before = c.set(f"atomicrmw add ptr {counter}, i64 1 acq_rel")
        with c.when(c.is_("ne", before, c.sub(parts, 1))):
            c.leave()
    first = c.at(jobs.read(c, "sums"), c.mul(c.mul(band, parts), size))
    total = c.select(several, first, "%scratch", "ptr")
    with c.loop(parts, start=1) as other:
        added = c.at(total, c.mul(other.index, size))
        with c.loop(size, step=jobs.LINE) as i:
            a, b = (c.load("<16 x float>", each, i.index, align=4) for each in (total, added))
            c.store("<16 x float>", c.set(f"fadd <16 x float> {a}, {b}"), total, i.index, align=4)
    write_rows(c, M, N, total, sum_row, begin, columns)
    c.do("ret void")
    return c.text()


def write_rows(c: Code, M: str, N: str, sums: str, sum_row: str, begin: str, columns: str) -> None:
    """Makes y [M, N] of the sums of a tile."""
    finish, y, y_row = (jobs.read(c, name) for name in ("finish", "y", "y_row"))
    size = c.div(y_row, N)
    with c.loop(M) as row:
        to = c.at(c.at(y, c.mul(row.index, y_row)), c.mul(begin, size))
        own = c.at(sums, c.mul(row.index, sum_row))
        c.do(f"call void {finish}(ptr {own}, ptr {to}, i64 {columns})")


def _sum_part(
    c: Code,
    scheme: Scheme,
    sums: str,
    K: str,
    begin: str,
    columns: str,
    part: str,
    parts: str,
) -> None:
    """The units of a part of K. The last part also has the steps that make no unit."""
    M, w_row, x, x_row, sum_row = (
        jobs.read(c, name) for name in ("M", "w_row", "x", "x_row", "sum_row")
    )
    w = c.at(jobs.read(c, "w"), c.mul(begin, scheme.weight_bytes))
    steps = c.div(K, scheme.span)
    units = c.div(steps, scheme.unroll)
    whole = c.mul(units, scheme.unroll)
    near = c.mul(w_row, scheme.span)
    apart = c.mul(w_row, units)
    far = c.mul(apart, scheme.span)

    def for_rows(
        step: str, w: str, w_step: str, w_pair: str, w_unit: str, count: str | int, unroll: int
    ) -> None:
        x_step = c.at(x, c.mul(step, scheme.x_bytes))

        def call(row: str, rows: int) -> None:
            own = c.at(x_step, c.mul(row, x_row))
            total = c.at(sums, c.mul(row, sum_row))
            c.do(
                f"call void @unit_{scheme.name}_{rows}_{unroll}(ptr {own}, i64 {x_row}, ptr {w}, i64 {w_step}, "
                f"i64 {w_pair}, i64 {w_unit}, ptr {total}, i64 {sum_row}, i64 {count}, i64 {columns})"
            )

        most, *fewer = row_counts(scheme)
        done = c.mul(c.div(M, most), most)
        with c.loop(done, step=most) as row:
            call(row.index, most)
        for rows in fewer:
            bit = c.set(f"and i64 {M}, {rows}")
            with c.when(c.is_("ne", bit, 0)):
                call(done, rows)
            done = c.add(done, bit)

    def share(number: str) -> str:
        return c.div(c.mul(units, number), parts)

    after = c.add(part, 1)
    with c.loop(share(after), start=share(part)) as unit:
        w_unit = c.at(w, c.mul(unit.index, w_row))
        for_rows(
            c.mul(unit.index, scheme.unroll),
            w_unit,
            far,
            apart,
            w_row,
            count=1,
            unroll=scheme.unroll,
        )
    rest = c.sub(steps, whole)
    ends = c.set(f"and i1 {c.is_('eq', after, parts)}, {c.is_('ne', rest, 0)}")
    with c.when(ends):
        for_rows(whole, c.at(w, c.mul(whole, near)), near, w_row, near, count=rest, unroll=1)
