"""Static descriptions of models, caches and engines: frozen, hashable, without jax.

May import: pallas_kernels.plan.
"""

from hybrid_jax.config.backend import BACKENDS as BACKENDS
from hybrid_jax.config.backend import PALLAS as PALLAS
from hybrid_jax.config.backend import XLA as XLA
from hybrid_jax.config.backend import Backend as Backend
from hybrid_jax.config.block import Block as Block
from hybrid_jax.config.block import Layer as Layer
from hybrid_jax.config.block import LowRank as LowRank
from hybrid_jax.config.block import Residual as Residual
from hybrid_jax.config.block import residual_layer as residual_layer
from hybrid_jax.config.cut import regrouped as regrouped
from hybrid_jax.config.cut import with_asked_cut as with_asked_cut
from hybrid_jax.config.cut import with_cut as with_cut
from hybrid_jax.config.cut import with_inner_cut as with_inner_cut
from hybrid_jax.config.engine import MAX_GRAIN as MAX_GRAIN
from hybrid_jax.config.engine import CacheConfig as CacheConfig
from hybrid_jax.config.engine import EngineConfig as EngineConfig
from hybrid_jax.config.engine import fixed_alpha as fixed_alpha
from hybrid_jax.config.engine import resolve_dtype as resolve_dtype
from hybrid_jax.config.layers import MLP as MLP
from hybrid_jax.config.layers import Attention as Attention
from hybrid_jax.config.layers import FeedForward as FeedForward
from hybrid_jax.config.layers import GatedDelta as GatedDelta
from hybrid_jax.config.layers import Mamba1 as Mamba1
from hybrid_jax.config.layers import Mamba2 as Mamba2
from hybrid_jax.config.layers import Mixer as Mixer
from hybrid_jax.config.layers import MoE as MoE
from hybrid_jax.config.layers import RecurrentMixer as RecurrentMixer
from hybrid_jax.config.layers import Rope as Rope
from hybrid_jax.config.layers import RopeScaling as RopeScaling
from hybrid_jax.config.layers import ShortConv as ShortConv
from hybrid_jax.config.layers import is_feed_forward as is_feed_forward
from hybrid_jax.config.layers import is_mixer as is_mixer
from hybrid_jax.config.layers import keeps_pages as keeps_pages
from hybrid_jax.config.layers import source_of as source_of
from hybrid_jax.config.model import DTYPES as DTYPES
from hybrid_jax.config.model import ModelConfig as ModelConfig
from hybrid_jax.config.speculation import SpeculationConfig as SpeculationConfig
