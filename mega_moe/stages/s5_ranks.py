"""ranks: experts are split over ranks, and rows travel to them and back.

New since persistent: each rank holds some tokens and some experts. Before the products rows are pulled from the ranks
that hold their tokens, and after them pushed back; what is between is persistent, on rows that are tokens of their own.
Rows travel through heaps where ranks reach each other's memory, and elsewhere by all_to_all. Exchange and products are
launches apart: while rows travel, no matrix unit works.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.exchange import meet_peers
from ..kernels.products import PRODUCTS
from ..kernels.tile_table import tile_table
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward                     backward
# dispatch    meet_peers, pull            combine_gradients
# gate_up     gate_up_swiglu              dx_slots, weight_grad
# swiglu      gate_up_swiglu              dact_swiglu
# down        down                        dact_swiglu, weight_grad
# combine     combine                     meet_peers, pull


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    of, _ = PRODUCTS[problem.precision]
    peers = meet_peers(problem, inputs)
    table = tile_table(peers.own, of.tiles(problem))
    rows, w_gate_up = peers.pull_x(of.rows, table), of.weights(inputs.w_gate_up)
    kept, limit = problem.save == "pre", problem.swiglu_limit
    pre, act = of.launches.gate_up_swiglu(rows, w_gate_up, peers.own, table, limit, kept, True)
    del rows
    out = of.launches.down(act, of.weights(inputs.w_down), peers.own, table)
    return peers.combine(out), Saved(peers.plan, pre, peers.call)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    of_forward, of = PRODUCTS[problem.precision]
    pre, limit = saved.pre, problem.swiglu_limit
    peers = meet_peers(problem, inputs, dy, saved)
    own = peers.own
    table = tile_table(own, of.tiles(problem))
    dw_gate_up = dw_down = None

    dy_rows, weight_of_row = peers.pull("dy", weights=True)
    rows = peers.pull("x")[0] if pre is None or need.dw_gate_up else None
    if pre is None:
        as_before = table if of is of_forward else tile_table(own, of_forward.tiles(problem))
        x, w_gate_up = of_forward.rows(rows, as_before), of_forward.weights(inputs.w_gate_up)
        pre, _ = of_forward.launches.gate_up_swiglu(x, w_gate_up, own, as_before, limit, True, False)
        del x, w_gate_up
    dpre, weighted_act, dweight_of_row = of.launches.dact_swiglu(
        of.rows(dy_rows, table), of.transposed(inputs.w_down), pre, weight_of_row, own, table, limit, need
    )
    del pre
    drows = of.launches.dx_slots(dpre, of.transposed(inputs.w_gate_up), own, table) if need.dx else None
    dx, dtopk_weights = peers.combine_gradients(drows, dweight_of_row)
    del drows
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        of.launches.weight_grad(dpre, of.columns(rows, table), table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        of.launches.weight_grad(weighted_act, of.columns(dy_rows, table), table, "dw_down", dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for, in 8 bits on those that multiply them; but some processors must
    be left to work on, and by all_to_all pre cannot be kept."""
    if problem.by_all_to_all and problem.save == "pre":
        return 'all_to_all counts rows while it runs, so nothing can be laid out to keep pre in: use save="inputs".'
    _, of = PRODUCTS[problem.precision]  # backward's: none multiplies less than forward's
    return blocks.why_not(problem) or of.why_not()


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device and this layer, and its products are the device's own."""
    _, of = PRODUCTS[problem.precision]
    return of.note(problem)
