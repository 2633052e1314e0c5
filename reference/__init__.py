"""A Mixture-of-Experts layer in plain torch, forward and backward, to be read in one sitting.

Read routing.py (who goes where), then forward.py and backward.py (five steps each way, the same five words), then
ranks.py (the same layer with its experts split over ranks) and quantize.py (the same products in 8 bits). Everything
runs on any device and in float64; nothing here is clever, and every faster implementation of this project is held to
it.
"""

from .backward import Grads, backward
from .forward import Saved, forward
from .quantize import PRECISIONS
from .routing import Plan, plan, router, router_backward

__all__ = ["PRECISIONS", "Grads", "Plan", "Saved", "backward", "forward", "plan", "router", "router_backward"]
