"""A token for each row of logits: greedy, or drawn from what min-p, top-k and top-p keep."""

from pallas_kernels.token_sampling.api import sample_tokens as sample_tokens
from pallas_kernels.token_sampling.reference import SamplingArrays as SamplingArrays
