"""What a mixture's experts make of the tokens that visit them."""

from typing import TYPE_CHECKING

from pallas_kernels.lazily import names_in

if TYPE_CHECKING:
    from pallas_kernels.grouped_linear.api import mix_experts as mix_experts
    from pallas_kernels.grouped_linear.reference import Activation as Activation
    from pallas_kernels.grouped_linear.reference import ExpertArrays as ExpertArrays
    from pallas_kernels.grouped_linear.reference import activate as activate
    from pallas_kernels.grouped_linear.xla import mix_visits as mix_visits
    from pallas_kernels.grouped_linear.xla import product_of_slice as product_of_slice

_HOMES = {
    "api": ("mix_experts",),
    "reference": ("Activation", "ExpertArrays", "activate"),
    "xla": ("mix_visits", "product_of_slice"),
}
__getattr__ = names_in(__name__, _HOMES)
