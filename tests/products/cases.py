"""Every form in which a matrix is kept as codes, and models whose matrices are kept so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.formats import DENSE, Format, Joined, Scaled
from hybrid_jax.kinds.kind import placed
from hybrid_jax.kinds.table import model_weights


@dataclass(frozen=True)
class Case:
    """A format, and bounds of its own.

    Attributes:
        format: with groups that are small enough for tiny models.
        share: bytes of the weights of a tiny model, of those of float32 numbers, at most.
        error: how far a number may be from the one that was encoded, as a share of the largest in the matrix.
    """

    format: Format
    share: float
    error: float


CASES = {
    "int8": Case(Scaled(code="int8"), 0.55, 1 / 254),
    "int8_zeros": Case(Scaled(code="int8", group=8, zeros=True, scale="float16"), 0.75, 1 / 254),
    "fp8": Case(Scaled(code="fp8"), 0.55, 1 / 16),
    "fp8_blocks": Case(Scaled(code="fp8", group=8, columns=8), 0.5, 1 / 16),
    "int4": Case(Scaled(code="int4", group=8, scale="bfloat16"), 0.55, 1 / 13),
    "int4_zeros": Case(Scaled(code="int4", group=8, zeros=True, ordered=True), 0.75, 1 / 13),
    "nvfp4": Case(Scaled(code="fp4", group=4, scale="float8_e4m3fn", second=True), 0.6, 1 / 5),
    "mxfp4": Case(Scaled(code="fp4", group=8, scale="uint8"), 0.5, 1 / 4),
}


def kept(config: ModelConfig, format: Format) -> ModelConfig:
    """The model with all matrices in a format but the embedding, and with those of several maps in two formats."""
    draft = None if config.draft is None else kept(config.draft, format)
    found = []
    for place, weight in placed(model_weights(replace(config, draft=None))):
        if not weight.is_matrix or weight.draw == "embedding" or weight.shape[-2] % 2:
            continue
        own = format
        if len(weight.fused) > 1 and len(weight.shape) == 2:
            *most, last = weight.fused
            own = Joined(parts=((sum(most), format), (last, DENSE)))
        found.append((place, own))
    return replace(config, matrices=tuple(found), draft=draft)
