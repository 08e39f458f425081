"""Models in and out: Hugging Face directories (safetensors) in, orbax directories out and in again.

Files are memory-mapped and each parameter is assembled on its own, so loading needs little more memory
than the model itself.

May import: config, kinds, models, process, products.
Packages: jax, ml_dtypes, numpy, orbax, safetensors.
"""

from hybrid_jax.models.files import BUNDLED as BUNDLED
from hybrid_jax.models.files import CheckpointNotFound as CheckpointNotFound
from hybrid_jax.models.files import read_json as read_json
from hybrid_jax.weights.load import Dtype as Dtype
from hybrid_jax.weights.load import add_second as add_second
from hybrid_jax.weights.load import load_config as load_config
from hybrid_jax.weights.load import load_model as load_model
from hybrid_jax.weights.load import open_second as open_second
from hybrid_jax.weights.load import open_with_drafter as open_with_drafter
from hybrid_jax.weights.load import with_draft as with_draft
from hybrid_jax.weights.orbax import save_orbax as save_orbax
