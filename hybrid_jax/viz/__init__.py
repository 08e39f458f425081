"""Pictures of what an engine did: memory, hits, drafts, the prefix tree, and the times of requests.

They need matplotlib: pip install 'hybrid_jax[plot]'. Each function draws into the axes it is given, or new ones, and
returns them.

May import: api, byte_sizes, cache.tree, process.
Packages: matplotlib, numpy.
"""

from __future__ import annotations

from hybrid_jax.viz.pictures import acceptance as acceptance
from hybrid_jax.viz.pictures import hit_rate as hit_rate
from hybrid_jax.viz.pictures import memory as memory
from hybrid_jax.viz.pictures import requests as requests
from hybrid_jax.viz.pictures import tree as tree
from hybrid_jax.viz.watch import Watch as Watch

__all__ = ["Watch", "acceptance", "hit_rate", "memory", "requests", "tree"]
