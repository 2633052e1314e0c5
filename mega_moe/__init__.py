"""mega_moe: Mixture-of-Experts layers, from plain torch up a ladder of Triton kernels, one idea a rung.

`moe` is the layer as a function, `MoE` as a module; `stage=` chooses the rung of `LADDER` that computes it.
"""

from .api import moe
from .capture import capture_layer
from .kept import keep_codes
from .module import MoE
from .processes import ShmHeaps, SymmetricHeaps
from .registry import LADDER
from .shapes import Problem
from .symmetric import LocalHeaps

__all__ = ["LADDER", "LocalHeaps", "MoE", "Problem", "ShmHeaps", "SymmetricHeaps", "capture_layer", "keep_codes", "moe"]
__version__ = "0.1.0"
