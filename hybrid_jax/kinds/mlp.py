"""MLPs: one, or a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import MLP, MoE
from hybrid_jax.kinds.kind import Kind, OnDevices, StepSize, Weight, Weights, divided, filled
from pallas_kernels.grouped_linear.plan import why_unsupported
from pallas_kernels.plan import Chip


class MLPKind(Kind):
    """See `config.MLP`."""

    name = "mlp"

    def weights(self, spec: MLP, width: int) -> Weights:
        return _mlp(width, spec.width, spec)

    def shard(self, spec: MLP, count: int) -> MLP:
        return replace(spec, width=filled(spec, "width", count))

    def row_bytes(self, spec: MLP, step: StepSize) -> int:
        return _hidden(spec.kind, spec.width, step.product(spec.width) // spec.width, step.item)

    chunk_bytes = row_bytes

    def xla_elements(self, spec: MLP, width: int) -> int:
        return _matrices(spec) * spec.width


class MoEKind(Kind):
    """See `config.MoE`."""

    name, operation = "moe", "experts"

    def weights(self, spec: MoE, width: int) -> Weights:
        inner, count = spec.latent_width or width, spec.num_experts
        experts = _mlp(inner, spec.width, spec, count // spec.shards)
        tree: Weights = {
            "router": Weight(shape=(width, count), draw="matrix", plain=True),
            **experts,
        }
        if spec.routing == "sigmoid":
            tree["router_bias"] = Weight(shape=(count,), draw="zeros", float32=True)
        if spec.shared_width:
            tree["shared"] = _mlp(width, spec.shared_width, spec)
            if spec.shared_gate:
                tree["shared_gate"] = Weight(shape=(width, 1), draw="matrix", plain=True)
        if spec.latent_width:
            tree["latent_down"] = Weight(shape=(width, inner), draw="matrix", stays=inner)
            tree["latent_up"] = Weight(shape=(inner, width), draw="matrix", stays=width)
            if spec.bias:
                tree["latent_down_bias"] = Weight(shape=(inner,), draw="zeros")
                tree["latent_up_bias"] = Weight(shape=(width,), draw="zeros", on_devices="first")
        return tree

    def shard(self, spec: MoE, count: int) -> MoE:
        """Each device has some of the experts, and chooses among all of them."""
        divided(spec, "num_experts", count)
        return replace(spec, shared_width=filled(spec, "shared_width", count), shards=count)

    def active_weights(self, spec: MoE, tree: Weights) -> int:
        inactive = sum(weight.size for weight in experts_of(tree))
        inactive = inactive * (spec.num_experts - spec.top_k) // spec.num_experts
        return super().active_weights(spec, tree) - inactive

    def with_one_expert(self, spec: MoE) -> MoE:
        return replace(spec, num_experts=1, top_k=1, num_groups=1, top_groups=1, shards=1)

    def why_unsupported(self, spec: MoE, dtype: str, chip: Chip) -> str | None:
        return why_unsupported(spec.num_experts, dtype, chip)

    def row_bytes(self, spec: MoE, step: StepSize) -> int:
        """Of each of a token's experts its hidden units and its output, or the hidden units of the shared expert; and
        the shared expert's output, or the layer's input."""
        inner = spec.latent_width or step.width
        visits = spec.top_k * (spec.width + inner) * step.item
        shared = _hidden(spec.kind, spec.shared_width, step.item, step.item)
        beside = step.width * step.item
        if spec.shared_width:
            beside = step.product(step.width, spec.shared_width)
        return max(visits, shared) + beside

    chunk_bytes = row_bytes

    def xla_elements(self, spec: MoE, width: int) -> int:
        hidden, inner = _matrices(spec) * spec.width, spec.latent_width or width
        return spec.top_k * (hidden + 2 * inner) + 3 * spec.shared_width

    def xla_step_elements(self, spec: MoE, width: int) -> int:
        """A copy of the expert that is visited."""
        experts = experts_of(self.weights(spec, width))
        return sum(weight.size for weight in experts) // (spec.num_experts // spec.shards)


def experts_of(tree: Weights) -> list[Weight]:
    """The weights of a mixture that belong to its experts."""
    return [tree[name] for name in ("up", "down", "up_bias", "down_bias") if name in tree]


def _matrices(spec: MLP | MoE) -> int:
    """How many matrices an MLP has: gate, up and down, or up and down."""
    return 3 if spec.kind == "gated_silu" else 2


def _mlp(width: int, hidden: int, spec: MLP | MoE, count: int | None = None) -> Weights:
    """The weights of an MLP of `hidden` units, or of `count` such MLPs side by side."""
    lead = () if count is None else (count,)
    fused = (hidden,) * (_matrices(spec) - 1)
    units: OnDevices = "runs" if count is None else "parts"
    up = (*lead, width, sum(fused))
    tree = {
        "up": Weight(shape=up, draw="matrix", fused=fused, on_devices=units),
        "down": Weight(shape=(*lead, hidden, width), draw="output", on_devices=units),
    }
    if spec.bias:
        bias = (*lead, sum(fused))
        tree["up_bias"] = Weight(shape=bias, draw="zeros", fused=fused, on_devices=units)
        # Of experts, the one that has it.
        once: OnDevices = "first" if count is None else "parts"
        tree["down_bias"] = Weight(shape=(*lead, width), draw="zeros", on_devices=once)
    return tree


def _hidden(kind: str, width: int, product: int, item: int) -> int:
    """Bytes per token of an MLP: its projection, and for a gated one the product with the gate."""
    return 2 * width * product + width * item if kind == "gated_silu" else width * product
