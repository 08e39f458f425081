"""The paper's 7B hybrid and its relatives, all in the paper's own FLOPs and bytes."""

from __future__ import annotations

from hybrid_jax.sim.model_specs import ModelSpec, load_spec, paper_costs

WIDTH, STATE_SIZE = 4096, 128


def variant(*, attention: int, ssm: int, mlp: int = 28, state_size: int = STATE_SIZE) -> ModelSpec:
    """A model of so many layers of each kind."""
    sizes = {"attention": attention, "ssm": ssm, "mlp": mlp, "state_size": state_size}
    return ModelSpec(
        name=f"{attention}/{ssm}/{mlp}, N = {state_size}",
        about="attention / SSM / feed-forward layers and the size of a state",
        costs=paper_costs(width=WIDTH, **sizes),
    )


PAPER_7B = load_spec("paper_7b")
REAL_7B = load_spec("paper_7b_real")
# As many weights as the hybrid has: 384 D^2.
TRANSFORMER_7B = variant(attention=32, ssm=0, mlp=32)
MAMBA_7B = variant(attention=0, ssm=64, mlp=0)
# Fig. 12a: (SSM, attention) layers; the 28 feed-forward layers stay.
COMPOSITIONS = ((32, 4), (30, 5), (28, 7), (24, 12), (0, 36))
# Fig. 12b
STATE_SIZES = (128, 64, 32, 16)
