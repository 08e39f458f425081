"""The table of kinds: what a spec and its kind say alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from hybrid_jax.config import EngineConfig, Mamba2, ModelConfig, residual_layer
from hybrid_jax.geometry import make_geometry
from hybrid_jax.kinds.mamba2 import Mamba2Kind
from hybrid_jax.kinds.table import KINDS, kind_of
from tests.kinds.latent import Latent, LatentKind


@dataclass(frozen=True, kw_only=True)
class WithoutPages(Latent):
    pages: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class WithPages(Mamba2):
    pages: ClassVar[bool] = True


@pytest.mark.parametrize(
    "spec, kind, said",
    [
        (
            WithoutPages(num_heads=2, head_dim=4, rank=6),
            LatentKind(),
            r"LatentKind: entry must .* got PageEntry\(elements=6, .*\) for WithoutPages with pages = False; change",
        ),
        (
            WithPages(num_heads=2, head_dim=4, state_size=8),
            Mamba2Kind(),
            "Mamba2Kind: entry must .* got None for WithPages with pages = True; change",
        ),
    ],
)
def test_a_spec_and_its_kind_both_say_whether_there_are_pages(spec, kind, said, monkeypatch):
    monkeypatch.setitem(KINDS, type(spec), kind)
    with pytest.raises(ValueError, match=said):
        kind_of(spec)
    config = ModelConfig(
        family="test", vocab_size=8, width=16, layers=(residual_layer(mixers=(spec,)),)
    )
    with pytest.raises(ValueError, match=said):
        make_geometry(config, EngineConfig())
