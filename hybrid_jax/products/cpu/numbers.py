"""Numbers as text of LLVM's language: bfloat16 and float32, and rows of x in the order in which products take them."""

from __future__ import annotations

from hybrid_jax.products.cpu.code import Code

BYTES = {"f32": 4, "bf16": 2}


def to_bf16(c: Code, value: str, lanes: int) -> str:
    """Float32 numbers as bfloat16 bits, rounded to even; NaN stays NaN.

    It takes integers alone: where no instruction rounds, LLVM would call a function of its own library.
    """
    kind = f"<{lanes} x i32>"
    bits = c.cast("bitcast", f"<{lanes} x float>", value, kind)
    high = c.set(f"lshr {kind} {bits}, splat (i32 16)")
    odd = c.set(f"and {kind} {high}, splat (i32 1)")
    more = c.set(f"add {kind} {c.set(f'add {kind} {bits}, splat (i32 32767)')}, {odd}")
    near = c.set(f"lshr {kind} {more}, splat (i32 16)")
    quiet = c.set(f"or {kind} {high}, splat (i32 64)")
    ordered = c.set(f"fcmp ord <{lanes} x float> {value}, {value}")
    chosen = c.set(f"select <{lanes} x i1> {ordered}, {kind} {near}, {kind} {quiet}")
    return c.cast("trunc", kind, chosen, f"<{lanes} x i16>")


def from_bf16(c: Code, bits: str, lanes: int) -> str:
    """Bfloat16 bits as float32 numbers."""
    kind = f"<{lanes} x i32>"
    wide = c.cast("zext", f"<{lanes} x i16>", bits, kind)
    high = c.set(f"shl {kind} {wide}, splat (i32 16)")
    return c.cast("bitcast", kind, high, f"<{lanes} x float>")


def spread_name(given: str, taken: str, streams: int) -> str:
    """The name of the function that `spread` writes."""
    return f"@spread_{given}_{taken}_{streams}"


def spread(given: str, taken: str, streams: int) -> str:
    """`spread(x, to, K)`: a row of x as a product takes it.

    The row is cut into `streams` equal parts. Their first numbers come first, then their second ones, and so on; what
    is left over comes last.

    Args:
        given, taken: "f32" or "bf16", what the numbers are and what they become.
    """
    name = spread_name(given, taken, streams)
    c = Code(f"define internal void {name}(ptr %x, ptr %to, i64 %K)")
    size, out, out_size = BYTES[given], f"i{8 * BYTES[taken]}", BYTES[taken]

    def take(index: str, lanes: int) -> str:
        place = c.at("%x", c.mul(index, size))
        value = c.load(f"<{lanes} x i{8 * size}>", place, align=size)
        if size == out_size:
            return value
        wide = c.cast("zext", f"<{lanes} x i16>", value, f"<{lanes} x i32>")
        return c.set(f"shl <{lanes} x i32> {wide}, splat (i32 16)")

    def put(value: str, lanes: int, index: str) -> None:
        c.store(f"<{lanes} x {out}>", value, c.at("%to", c.mul(index, out_size)), align=out_size)

    part, lanes = c.div("%K", streams), 8 if streams == 1 else streams
    blocks = c.set(f"and i64 {part}, {-lanes}")
    low = [i // 2 + (lanes if i % 2 else 0) for i in range(lanes)]
    masks = low, [i + lanes // 2 for i in low]
    with c.loop(blocks, step=lanes) as j:
        values = [take(c.add(j.index, c.mul(part, stream)), lanes) for stream in range(streams)]
        half = streams // 2
        for _ in range(streams.bit_length() - 1):  # a transpose: each turn interleaves two halves
            values = [
                c.shuffle(out, values[i], values[i + half], mask)
                for i in range(half)
                for mask in masks
            ]
        for i, value in enumerate(values):
            put(value, lanes, c.mul(c.add(j.index, i), streams))
    with c.loop(part, start=blocks) as j:
        for stream in range(streams):
            one = take(c.add(j.index, c.mul(part, stream)), 1)
            put(one, 1, c.add(c.mul(j.index, streams), stream))
    with c.loop("%K", start=c.mul(part, streams)) as j:
        put(take(j.index, 1), 1, j.index)
    c.do("ret void")
    return c.text()
