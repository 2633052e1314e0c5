"""Layers whose results are known to the bit: whole numbers, small enough that fp32 holds every sum of their products.

Then the order of a sum does not matter, a kernel and plain torch round the same number once, and must agree exactly.
"""

from itertools import pairwise

import torch
from cases import DEVICE
from torch import Tensor

from mega_moe import routing
from mega_moe.shapes import Plan


def whole(*shape: int, dtype: torch.dtype = torch.float32, most: int = 4, seed: int = 0) -> Tensor:
    """Random whole numbers in -most .. most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


def plan_of(rows_per_expert: list[int], masked: int = 0) -> Plan:
    """A plan with that many rows for each expert and `masked` routes at the end. K = 1, and row r is token r."""
    experts = torch.arange(len(rows_per_expert)).repeat_interleave(torch.tensor(rows_per_expert))
    ids = torch.cat([experts, experts.new_full((masked,), -1)])
    return routing.plan(ids[:, None].to(DEVICE), len(rows_per_expert))


def rows_of(plan: Plan) -> list[slice]:
    """The rows of each expert."""
    starts = plan.row_start.tolist()
    return [slice(start, end) for start, end in pairwise(starts)]


def same_values(got: Tensor, expected: Tensor) -> bool:
    """Equal values in the same dtype; NaN equals NaN, and 0 equals -0."""
    without_nan = [torch.where(t.isnan(), 0.0, t) for t in (got, expected)]
    return got.dtype == expected.dtype and torch.equal(*without_nan) and torch.equal(got.isnan(), expected.isnan())
