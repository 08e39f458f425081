"""How sums of products are made of each kind of weights: the innermost step, in the vectors of a variant."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_jax.products.cpu.code import Code
from hybrid_jax.products.cpu.numbers import BYTES, from_bf16, to_bf16
from hybrid_jax.products.cpu.variants import Variant


@dataclass(frozen=True)
class Scheme:
    """Float32 weights, and what other weights do otherwise.

    A step takes `span` numbers of a row of x, and as many rows of weights. Sums of a step are vectors of columns.

    Attributes:
        variant: how vectors are made.
        name: of its functions. weights: "f32" or "bf16". takes: what numbers of x become first.
        span: as above. unroll: steps of a unit, the rows of which lie far apart in the matrix.
        ahead: bytes that are fetched into the second cache before they are read. Into the first cache would be slower.
    """

    variant: Variant
    name = "f32"
    weights = "f32"
    takes = "f32"
    span = 1
    unroll = 8
    ahead = 1024

    @property
    def streams(self) -> int:
        """Parts of K that are read side by side."""
        return self.span * self.unroll

    @property
    def weight_bytes(self) -> int:
        """Of a weight."""
        return BYTES[self.weights]

    @property
    def x_bytes(self) -> int:
        """Of the numbers of a row of x in a step."""
        return self.span * BYTES[self.takes]

    def load(self, c: Code, at: str, vectors: int) -> list[str]:
        """The weights of a step, for so many vectors of columns; `%w_pair` is where the second row of a pair lies."""
        return [
            c.load(self.variant.vector, at, 4 * self.variant.lanes * v, 4) for v in range(vectors)
        ]

    def spread(self, c: Code, at: str) -> str:
        """The numbers of a row of x in a step, in all lanes."""
        return c.splat("float", c.load("float", at, align=4), self.variant.lanes)

    def add(self, c: Code, total: str, x: str, w: str) -> str:
        """The sum and one step more."""
        vector, lanes = self.variant.vector, self.variant.lanes
        operands = ", ".join(f"{vector} {value}" for value in (x, w, total))
        return c.set(f"call {vector} @llvm.fma.v{lanes}f32({operands})")

    def ordered(self, c: Code, sums: list[str]) -> list[str]:
        """Vectors of sums in the order of the columns."""
        return sums

    # Where rows of weights are multiplied as they lie, x and weights are vectors along K.

    @property
    def along(self) -> int:
        """Numbers along K in a vector."""
        return self.variant.lanes

    def load_along(self, c: Code, at: str) -> str:
        """Weights along K."""
        return c.load(self.variant.vector, at, align=4)

    def x_along(self, c: Code, at: str) -> str:
        """Numbers of x along K."""
        return c.load(self.variant.vector, at, align=4)


class WideBF16(Scheme):
    """Bfloat16 weights that become float32: of two columns one by a shift, and the other one by a mask."""

    name = "wide"
    weights = "bf16"
    ahead = 512

    def load(self, c: Code, at: str, vectors: int) -> list[str]:
        kind, found = f"<{self.variant.lanes} x i32>", []
        for v in range(vectors // 2):
            both = c.load(kind, at, 4 * self.variant.lanes * v, 2)
            even = c.set(f"shl {kind} {both}, splat (i32 16)")
            odd = c.set(f"and {kind} {both}, splat (i32 -65536)")
            found += [c.cast("bitcast", kind, bits, self.variant.vector) for bits in (even, odd)]
        return found

    def ordered(self, c: Code, sums: list[str]) -> list[str]:
        lanes = self.variant.lanes
        return _reordered(c, sums, [i // 2 + (lanes if i % 2 else 0) for i in range(2 * lanes)])

    def load_along(self, c: Code, at: str) -> str:
        lanes = self.variant.lanes
        return from_bf16(c, c.load(f"<{lanes} x i16>", at, align=2), lanes)


class PairsBF16(Scheme):
    """Bfloat16 weights and x, for an instruction that multiplies pairs and sums them in float32."""

    name = "pairs"
    weights = "bf16"
    takes = "bf16"
    span = 2
    ahead = 512

    def load(self, c: Code, at: str, vectors: int) -> list[str]:
        words, found = 2 * self.variant.lanes, []
        # Columns 0 to 3, 8 to 11, ... of two rows, interleaved as one instruction does it; then the others.
        low = [
            base + i // 2 + (words if i % 2 else 0) for base in range(0, words, 8) for i in range(8)
        ]
        below = c.at(at, "%w_pair")
        for v in range(vectors // 2):
            a, b = (c.load(f"<{words} x i16>", row, 2 * words * v, 2) for row in (at, below))
            for mask in (low, [i + 4 for i in low]):
                mixed = c.shuffle("i16", a, b, mask)
                found.append(c.cast("bitcast", f"<{words} x i16>", mixed, self._pair))
        return found

    def spread(self, c: Code, at: str) -> str:
        value = c.splat("i32", c.load("i32", at, align=2), self.variant.lanes)
        return c.cast("bitcast", f"<{self.variant.lanes} x i32>", value, self._pair)

    def add(self, c: Code, total: str, x: str, w: str) -> str:
        vector, bits = self.variant.vector, 32 * self.variant.lanes
        operands = f"{vector} {total}, {self._pair} {x}, {self._pair} {w}"
        return c.set(f"call {vector} @llvm.x86.avx512bf16.dpbf16ps.{bits}({operands})")

    def ordered(self, c: Code, sums: list[str]) -> list[str]:
        lanes, source = self.variant.lanes, []
        for column in range(2 * lanes):
            group, inside = divmod(column, 8)
            source.append(4 * group + (inside if inside < 4 else lanes + inside - 4))
        return _reordered(c, sums, source)

    @property
    def along(self) -> int:
        return 2 * self.variant.lanes

    def load_along(self, c: Code, at: str) -> str:
        return c.load(self._pair, at, align=2)

    x_along = load_along

    @property
    def _pair(self) -> str:
        return f"<{2 * self.variant.lanes} x bfloat>"


def _reordered(c: Code, sums: list[str], source: list[int]) -> list[str]:
    """Two vectors at a time: where each of their columns comes from."""
    found, half = [], len(source) // 2
    for low, high in zip(sums[::2], sums[1::2], strict=True):
        found += [c.shuffle("float", low, high, part) for part in (source[:half], source[half:])]
    return found


def scheme_for(variant: Variant, x: str, weights: str) -> Scheme:
    """The scheme for x and weights that are "f32" or "bf16"."""
    if weights == "f32":
        return Scheme(variant)
    return PairsBF16(variant) if x == "bf16" and variant.pairs else WideBF16(variant)


def finish_name(scheme: Scheme, layout: str, out: str) -> str:
    """The name of the function that makes numbers of y of sums."""
    return f"@finish_{layout}_{scheme.name}_{out}"


def finish_columns(scheme: Scheme, out: str) -> str:
    """`finish(sums, y, columns)`: a row's sums, in the order of the steps, become numbers of y."""
    variant, size = scheme.variant, BYTES[out]
    c = Code(
        f"define internal void {finish_name(scheme, 'columns', out)}(ptr %sums, ptr %y, i64 %columns)"
    )
    last = c.sub("%columns", variant.block)
    with c.loop("%columns", step=variant.block) as columns:
        at = c.at("%sums", c.mul(columns.index, 4))
        sums = [c.load(variant.vector, at, 4 * variant.lanes * v, 4) for v in range(4)]
        y = c.at("%y", c.mul(c.min(columns.index, last), size))
        for v, value in enumerate(scheme.ordered(c, sums)):
            _store(c, value, variant.lanes, out, y, size * variant.lanes * v)
    c.do("ret void")
    return c.text()


def finish_rows(scheme: Scheme, out: str) -> str:
    """The same for sums that are in the order of the columns."""
    head = finish_name(scheme, "rows", out)
    c = Code(f"define internal void {head}(ptr %sums, ptr %y, i64 %columns)")
    with c.loop("%columns") as n:
        value = c.load("<1 x float>", c.at("%sums", c.mul(n.index, 4)), align=4)
        _store(c, value, 1, out, c.at("%y", c.mul(n.index, BYTES[out])), 0)
    c.do("ret void")
    return c.text()


def _store(c: Code, value: str, lanes: int, out: str, y: str, offset: int) -> None:
    if out == "f32":
        c.store(f"<{lanes} x float>", value, y, offset, 4)
    else:
        c.store(f"<{lanes} x i16>", to_bf16(c, value, lanes), y, offset, 2)
