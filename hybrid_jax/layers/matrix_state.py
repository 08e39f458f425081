"""The form of mixers whose state is a matrix for each head, which decays and to which each token adds.

There are M heads with values of P numbers and keys of R numbers; equal blocks of heads share one of G keys. A token
makes state_t = decay_t state_(t-1) + u_t k_t^T, and reads state_t q_t. A kind says what u, k, q and the decays are. The
record of a token stands for its part of later states: u and k, and what its decay is made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from hybrid_jax.layers.convolution import depthwise
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of, gates_of, size_of
from hybrid_jax.products.matrix import product
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import ProjectionLayout

Spec = TypeVar("Spec")
Fields = dict[str, jax.Array]  # of records, by the names in `StateLayout.records`


class Inputs(NamedTuple):
    """What in_proj gives beside the inputs of the convolution.

    Attributes:
        z: [B, T, M P] gates. dt: float32[B, T, M] step sizes; None if decays are fixed. beta: float32[B, T, M] rates of
            writing; None for a kind without.
    """

    z: jax.Array
    dt: jax.Array | None = None
    beta: jax.Array | None = None


class Tokens(NamedTuple):
    """What tokens bring to a state.

    Attributes:
        z: [B, T, M P] gates of what they read. q: [B, T, G, R] what they read with; a kind may keep it flat.
        records: [B, T, ...] their records. "uk" has u and k in one array [B, T, M P + G R]. Where u follows from the
            state, it means nothing before a window or a scan.
        rest: what else the kind needs of them.
    """

    z: jax.Array
    q: jax.Array
    records: Fields
    rest: Any = None


class MatrixState(Generic[Spec]):
    """The equations of one kind; a kind overrides what is different in it.

    Parameters: in_proj [D, z | v | k | q | dt], with M more columns at its end if the layout has `delta`, conv [W, E]
    with E = v | k | q, A_log and dt_bias [M] float32, out_proj [M P, D], optional in_bias, conv_bias [E] and out_bias.
    Without step sizes there are no dt, A_log and dt_bias, and without a convolution there is no conv.

    After a cut, in_proj has the columns of z alone, or z and what is added to q; the others come from the projection of
    the cut's output.
    """

    def layout(self, spec: Spec) -> ProjectionLayout:
        """How projections, records and states lie in memory, if the mixer stands before a cut. Without a convolution,
        `conv_width` is 1."""
        raise NotImplementedError

    def project(self, params: dict, h: MixerInput, spec: Spec) -> tuple[jax.Array, Any]:
        """From h [B, T, D], the raw v, k and q [B, T, E] and the rest, `Inputs` or another tuple; dt = softplus(dt +
        dt_bias) and beta = sigmoid(b)."""
        layout = self.layout(spec)
        sizes = [layout.conv_size, layout.num_heads][: ("dt_bias" in params) + layout.delta]
        if isinstance(h, CutInput):
            z = gates_of(params, h, layout.inner_size)
            raw, *rates = jnp.split(h.written, list(itertools.accumulate(sizes)), axis=-1)
        else:
            projected = product(h, params["in_proj"], params.get("in_bias"))
            ends = list(itertools.accumulate([layout.inner_size, *sizes]))
            z, raw, *rates = jnp.split(projected, ends, axis=-1)
        dt, b = (*(rate.astype(jnp.float32) for rate in rates), None, None)[:2]
        if dt is not None:
            dt = jax.nn.softplus(dt + params["dt_bias"].astype(jnp.float32))
        return raw, Inputs(z, dt, None if b is None else jax.nn.sigmoid(b))

    def convolve(self, params: dict, columns: jax.Array, spec: Spec) -> jax.Array:
        """The causal depthwise convolution: raw columns [B, W - 1 + T, E] to float32[B, T, E]. Without one, the columns
        as they are."""
        if "conv" not in params:
            return columns
        return depthwise(columns, params["conv"], params.get("conv_bias"))

    def activate(self, params: dict, convolved: jax.Array, rest: Any, spec: Spec) -> Tokens:
        """From what `convolve` and `project` give, what the tokens bring to the state."""
        raise NotImplementedError

    def decay_rates(self, params: dict) -> Any:
        """What decays are made of beside records and spec, for one layer: A = -exp(A_log), float32[M]. None if that is
        nothing."""
        return -jnp.exp(params["A_log"].astype(jnp.float32))

    def scan(
        self,
        params: dict,
        tokens: Tokens,
        state: jax.Array,
        lengths: jax.Array,
        state_lengths: jax.Array,
        spec: Spec,
        implementation: Implementation | None,
    ) -> tuple[jax.Array, Fields, jax.Array]:
        """What tokens read y [B, T, M, P], their records, and the state [B, M, P, R] after `state_lengths` of them;
        arguments as for `chunk`."""
        raise NotImplementedError

    def fold(
        self, rates: Any, state: jax.Array, ring: Fields, lengths: jax.Array, spec: Spec
    ) -> jax.Array:
        """Makes the next checkpoint from a checkpoint [B, M, P, R] and the first `lengths` int32[B] records of a ring
        [B, S, ...]; `rates` come from `decay_rates`."""
        raise NotImplementedError

    def gate(
        self,
        params: dict,
        y: jax.Array,
        projected: jax.Array,
        spec: Spec,
        implementation: Implementation,
    ) -> jax.Array:
        """Norm and gate of y [B, T, M P].

        Args:
            projected: [B, T, >= M P] with z in front, or parts of it. implementation: as `gated_rmsnorm` takes it.
        """
        raise NotImplementedError

    def output(self, params: dict, y: jax.Array, z: jax.Array, spec: Spec) -> jax.Array:
        """Norm, gate z [B, T, M P] and out_proj of y [B, T, M, P]: [B, T, D]."""
        y = self.gate(params, y.reshape(z.shape).astype(z.dtype), z, spec, "xla")
        return product(y, params["out_proj"], params.get("out_bias"))

    # --- the same for all kinds -------------------------------------------------------------------

    def prepare(self, params: Sequence[dict]) -> Any:
        """The decay rates of several layers, [L, ...]."""
        rates = [self.decay_rates(weights) for weights in params]
        return jax.tree.map(lambda *layers: jnp.stack(layers), *rates)

    def tokens(
        self, params: dict, raw: jax.Array, rest: Any, conv: jax.Array, spec: Spec
    ) -> tuple[Tokens, jax.Array]:
        """What tokens with raw inputs [B, T, E] bring after columns conv [B, W - 1, E]; and all columns."""
        columns = jnp.concatenate([conv.astype(raw.dtype), raw], axis=1)
        return self.activate(params, self.convolve(params, columns, spec), rest, spec), columns

    def chunk(
        self,
        params: dict,
        h: MixerInput,
        state: jax.Array,
        conv: jax.Array,
        lengths: jax.Array,
        state_lengths: jax.Array,
        spec: Spec,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        """Runs a chunk of tokens from a checkpoint.

        Args:
            h: [B, T, D] normed inputs. If only states are asked for, the outputs mean nothing.
            state: [B, M, P, R] float32; conv: [B, W - 1, E] raw convolution inputs before the chunk.
            lengths: int32[B] valid tokens. state_lengths: int32[B] how many tokens the returned state covers.
            implementation: of the scan.

        Returns:
            out [B, T, D]; the state after `state_lengths` tokens; raw columns [B, W - 1 + T, E] with the history in
            front, so that columns[b, n : n + W - 1] is the history after n tokens; and the records, which mean nothing
            past `lengths`.
        """
        valid = (jnp.arange(size_of(h)[1]) < lengths[:, None])[..., None]
        raw, rest = self.project(params, h, spec)
        tokens, columns = self.tokens(params, jnp.where(valid, raw, 0), rest, conv, spec)
        y, records, state = self.scan(
            params, tokens, state, lengths, state_lengths, spec, implementation
        )
        return self.output(params, y, tokens.z, spec), state, columns, records

    def nothing(self, h: MixerInput, spec: Spec) -> tuple[jax.Array, jax.Array]:
        """State and columns before a sequence."""
        sizes, rows = self.layout(spec), size_of(h)[0]
        shape = (rows, sizes.num_heads, sizes.head_dim, sizes.state_size)
        conv = jnp.zeros((rows, sizes.history, sizes.conv_size), dtype_of(h))
        return jnp.zeros(shape, jnp.float32), conv

    def whole(
        self, params: dict, h: MixerInput, positions: jax.Array, lengths: jax.Array, spec: Spec
    ) -> jax.Array:
        """Runs whole sequences h [B, T, D] from a zero state, with lengths int32[B] real tokens: [B, T, D]."""
        return self.chunk(params, h, *self.nothing(h, spec), lengths, lengths, spec)[0]
