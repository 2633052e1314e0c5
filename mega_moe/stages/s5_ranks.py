"""ranks: experts are split over ranks, and rows travel to them and back.

New since persistent: each rank holds some tokens and some experts. Before the products rows are pulled from the ranks
that hold their tokens, and after them pushed back; what is between is persistent, on rows that are tokens of their own.
Rows travel through heaps where ranks reach each other's memory, and elsewhere by all_to_all. Exchange and products are
launches apart: while rows travel, no matrix unit works.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.exchange import meet_peers
from ..kernels.persistent import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from ..kernels.tile_table import tile_table
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward                     backward
# dispatch    meet_peers, pull            combine_gradients
# gate_up     gate_up_swiglu              dx_slots, weight_grad
# swiglu      gate_up_swiglu              dact_swiglu
# down        down                        dact_swiglu, weight_grad
# combine     combine                     meet_peers, pull


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    peers = meet_peers(problem, inputs)
    rows, _ = peers.pull("x")
    table = tile_table(peers.own, blocks.persistent_for(problem))
    w_gate_up, limit = readable(inputs.w_gate_up), problem.swiglu_limit
    pre, act = gate_up_swiglu(rows, w_gate_up, peers.own, table, limit, problem.save == "pre", True)
    del rows
    out = down(act, readable(inputs.w_down), peers.own, table)
    return peers.combine(out), Saved(peers.plan, pre, peers.call)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    pre = saved.pre
    peers = meet_peers(problem, inputs, dy, saved)
    own = peers.own
    table = tile_table(own, blocks.persistent_for(problem))
    w_gate_up, limit = readable(inputs.w_gate_up), problem.swiglu_limit
    dw_gate_up = dw_down = None

    dy_rows, weight_of_row = peers.pull("dy", weights=True)
    rows = peers.pull("x")[0] if pre is None or need.dw_gate_up else None
    if pre is None:
        pre, _ = gate_up_swiglu(rows, w_gate_up, own, table, limit, True, False)
    dpre, weighted_act, dweight_of_row = dact_swiglu(
        dy_rows, readable(inputs.w_down), pre, weight_of_row, own, table, limit, need
    )
    del pre
    drows = dx_slots(dpre, w_gate_up, own, table) if need.dx else None
    dx, dtopk_weights = peers.combine_gradients(drows, dweight_of_row)
    del drows
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        weight_grad(dpre, rows, table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        weight_grad(weighted_act, dy_rows, table, "dw_down", dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for; but some processors must be left to work on, and by all_to_all
    pre cannot be kept."""
    if problem.by_all_to_all and problem.save == "pre":
        return 'all_to_all counts rows while it runs, so nothing can be laid out to keep pre in: use save="inputs".'
    return blocks.why_not(problem)


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device and this layer."""
    return blocks.persistent_note(problem)
