"""The form of kinds whose state is a matrix for each head, which decays (`layers.matrix_state` has the equations)."""

from __future__ import annotations

from typing import Any, NamedTuple

from hybrid_jax.config import source_of
from hybrid_jax.config.engine import MAX_GRAIN
from hybrid_jax.kinds.kind import Parts, RecurrentKind, StateLayout, Weight, Weights


class MatrixSize(NamedTuple):
    """M heads with values of P channels, and G keys of R channels, each shared by equal blocks of heads."""

    heads: int
    value: int
    groups: int
    key: int


class MatrixStateKind(RecurrentKind):
    """A state's units are heads. A kind overrides what is different in it.

    Attributes:
        names: of the parts of its projection: gates, values, keys, what a state is read with, step sizes, and what
            rates of writing are made of. A kind without the last one, or the last two, leaves them out. Without a
            convolution, `conv_width` of a spec is 1.
    """

    names: tuple[str, ...]

    @property
    def has_steps(self) -> bool:
        """Whether decays depend on the token, by step sizes."""
        return len(self.names) > 4

    def size(self, spec: Any) -> MatrixSize:
        """M, P, G and R."""
        raise NotImplementedError

    def layout(self, spec: Any) -> StateLayout:
        size, (_, *convolved) = self.size(spec), self._columns(spec)[:4]
        steps = (("dt", size.heads, "float32"),) if self.has_steps else ()
        return StateLayout(
            units=size.heads,
            unit_words=size.value * size.key,
            columns=spec.conv_width - 1,
            channels=sum(convolved),
            fused=tuple(convolved),
            records=(("uk", sum(convolved[:2]), None), *steps),
            scales=size.key,  # a quarter less error than with one for each value (benchmarks/cache/checkpoints.py)
        )

    def weights(self, spec: Any, width: int) -> Weights:
        values, *convolved = self._columns(spec)[:4]
        heads, own = (self.size(spec).heads,), tuple(self.parts(spec).own.values())
        conv, fused = (spec.conv_width, sum(convolved)), tuple(convolved)
        steps = sum(self._columns(spec)[4:]) if source_of(spec) == "own" else 0
        tree = {
            "dt_bias": Weight(shape=heads, draw="step_bias", float32=True),
            "in_proj": Weight(shape=(width, sum(own)), draw="matrix", fused=own, stays=steps),
            "conv": Weight(shape=conv, draw="conv", fused=fused),
            "A_log": Weight(shape=heads, draw="log_decay", float32=True),
            "out_proj": Weight(shape=(values, width), draw="output"),
        }
        if not self.has_steps:
            del tree["dt_bias"], tree["A_log"]
        if spec.conv_width == 1:
            del tree["conv"]
        elif spec.conv_bias:
            tree["conv_bias"] = Weight(shape=conv[1:], draw="zeros", fused=fused)
        return tree

    def parts(self, spec: Any) -> Parts:
        gates, *_, readout = self.names[:4]
        whole = dict(zip(self.names, self._columns(spec), strict=True))
        source = source_of(spec)
        if source == "own":
            return Parts(whole, {})
        written = [readout] if source == "group" else self.names[1:]
        return Parts({gates: whole[gates]}, {name: whole[name] for name in written}, readout)

    def xla_elements(self, spec: Any, width: int) -> int:
        """Beside what every kind has, the decay matrices of a tile."""
        return super().xla_elements(spec, width) + 3 * MAX_GRAIN * self.size(spec).heads

    def _columns(self, spec: Any) -> tuple[int, ...]:
        """Of each part of the projection."""
        heads, value, groups, key = self.size(spec)
        values, keys = heads * value, groups * key
        return (values, values, keys, keys, heads, heads)[: len(self.names)]
