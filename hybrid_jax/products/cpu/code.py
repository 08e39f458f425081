"""The text of functions in LLVM's language (IR): instructions, loops and branches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class Loop:
    """A loop that is being written.

    Attributes:
        index: the name of what counts. values: names of what the loop carries, in the body and after it.
        next: what these become; the body sets it.
    """

    index: str
    values: list[str]
    next: list[str]


class Code:
    """A function. Integers are i64 where nothing else is said, and an operand is a name or a number.

    Args:
        head: its first line without the bracket.
    """

    def __init__(self, head: str) -> None:
        self.lines = [head + " {", "entry:"]
        self._count, self._block = 0, "entry"

    def text(self) -> str:
        """All of it."""
        return "\n".join([*self.lines, "}", ""])

    # --- instructions -----------------------------------------------------------------------------

    def do(self, text: str) -> None:
        """An instruction without a value."""
        self.lines.append(f"  {text}")

    def set(self, text: str) -> str:
        """An instruction; returns the name of its value."""
        value = "%" + self._name("v")
        self.lines.append(f"  {value} = {text}")
        return value

    def add(self, a: str | int, b: str | int) -> str:
        """The sum."""
        return self.set(f"add i64 {a}, {b}")

    def sub(self, a: str | int, b: str | int) -> str:
        """The difference."""
        return self.set(f"sub i64 {a}, {b}")

    def mul(self, a: str | int, b: str | int) -> str:
        """The product."""
        return self.set(f"mul i64 {a}, {b}")

    def div(self, a: str | int, b: str | int) -> str:
        """The whole part of a quotient of numbers that are not negative."""
        return self.set(f"udiv i64 {a}, {b}")

    def min(self, a: str | int, b: str | int) -> str:
        """The smaller one of numbers that are not negative."""
        return self.set(f"call i64 @llvm.umin.i64(i64 {a}, i64 {b})")

    def max(self, a: str | int, b: str | int) -> str:
        """The larger one of numbers that are not negative."""
        return self.set(f"call i64 @llvm.umax.i64(i64 {a}, i64 {b})")

    def rounded_up(self, a: str | int, unit: int) -> str:
        """To a multiple of `unit`, a power of two."""
        return self.set(f"and i64 {self.add(a, unit - 1)}, {-unit}")

    def is_(self, how: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        """A comparison of integers: `how` is eq, ne, ult and so on."""
        return self.set(f"icmp {how} {kind} {a}, {b}")

    def select(self, condition: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        """One of two values of a kind: the first if the condition holds."""
        return self.set(f"select i1 {condition}, {kind} {a}, {kind} {b}")

    # --- memory -----------------------------------------------------------------------------------

    def at(self, base: str, offset: str | int) -> str:
        """A pointer so many bytes further."""
        return self.set(f"getelementptr i8, ptr {base}, i64 {offset}")

    def load(self, kind: str, base: str, offset: str | int = 0, align: int = 8) -> str:
        """The value of a kind that lies so many bytes after a pointer."""
        return self.set(f"load {kind}, ptr {self._place(base, offset)}, align {align}")

    def store(
        self, kind: str, value: str | int, base: str, offset: str | int = 0, align: int = 8
    ) -> None:
        """Writes a value so many bytes after a pointer."""
        self.do(f"store {kind} {value}, ptr {self._place(base, offset)}, align {align}")

    # --- vectors ----------------------------------------------------------------------------------

    def splat(self, kind: str, value: str, lanes: int) -> str:
        """A value in all lanes."""
        one = self.set(f"insertelement <{lanes} x {kind}> poison, {kind} {value}, i64 0")
        return self.shuffle(kind, one, "poison", [0] * lanes)

    def shuffle(self, kind: str, a: str, b: str, mask: Sequence[int]) -> str:
        """Lanes of two vectors, which have as many as the result."""
        lanes = len(mask)
        picked = ", ".join(f"i32 {i}" for i in mask)
        vector = f"<{lanes} x {kind}>"
        return self.set(f"shufflevector {vector} {a}, {vector} {b}, <{lanes} x i32> <{picked}>")

    def cast(self, how: str, kind: str, value: str, to: str) -> str:
        """A value of another kind: `how` is bitcast, zext or trunc."""
        return self.set(f"{how} {kind} {value} to {to}")

    # --- where it goes on -------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(
        self,
        end: str | int,
        carried: Sequence[tuple[str, str]] = (),
        *,
        start: str | int = 0,
        step: int = 1,
    ) -> Iterator[Loop]:
        """Counts from `start` to `end`. `carried` are kinds and first values; the body sets `Loop.next`."""
        head, body, done = (self._name(name) for name in ("head", "body", "done"))
        before = self._block
        self.do(f"br label %{head}")
        self.label(head)
        place, index = len(self.lines), "%" + self._name("i")
        values = ["%" + self._name("c") for _ in carried]
        self.do(f"br i1 {self.is_('ult', index, end)}, label %{body}, label %{done}")
        self.label(body)
        state = Loop(index, values, list(values))
        yield state
        following = self.add(index, step)
        phis = [f"  {index} = phi i64 [{start}, %{before}], [{following}, %{self._block}]"]
        for (kind, first), value, later in zip(carried, values, state.next, strict=True):
            phis.append(f"  {value} = phi {kind} [{first}, %{before}], [{later}, %{self._block}]")
        self.do(f"br label %{head}")
        self.lines[place:place] = phis
        self.label(done)

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """What is done only under a condition. It may end with `leave`."""
        body, done = self._name("then"), self._name("after")
        self.do(f"br i1 {condition}, label %{body}, label %{done}")
        self.label(body)
        yield
        self.do(f"br label %{done}")
        self.label(done)

    def leave(self, value: str = "void") -> None:
        """Returns from the function; what follows in the block is never reached."""
        self.do(f"ret {value}")
        self.label(self._name("never"))

    def label(self, name: str) -> None:
        """Begins a block of instructions."""
        self.lines.append(f"{name}:")
        self._block = name

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{what}{self._count}"

    def _place(self, base: str, offset: str | int) -> str:
        return base if offset == 0 else self.at(base, offset)
