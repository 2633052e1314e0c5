"""The schedules that docs/stepper.md steps through, as data for the browser.

They come from mega_moe/schedule.py, the same function that the kernels' tables are held to. What is added here is what
a reader wants to see and no kernel needs: the names of counters, which tiles store what a tile reads, and other orders
of the same tiles, right ones and wrong ones. docs/js/stepper.js draws tickets and waits; it decides nothing else.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mega_moe.kernels.blocks import Elementwise, Mega, mega
from mega_moe.kernels.schedule import backward_work, forward_work
from mega_moe.routing import plan
from mega_moe.schedule import (
    BLOCK,
    COLUMNS,
    COMBINE,
    EXPERT,
    KIND,
    KINDS,
    ROW,
    ROWS,
    STEP_OF_KIND,
    Work,
    counter_of,
    home_of_row,
    schedule,
    signals_of,
)
from mega_moe.shapes import Need, Plan, Problem
from mega_moe.symmetric import shares
from mega_moe.timeline import COLOURS

DIRECTIONS = ("forward", "backward")

LENGTHS = {
    "dispatch": 2,
    "gate_up": 4,
    "down": 2,
    "dact": 2,
    "dx": 4,
    "dw_gate_up": 4,
    "dw_down": 2,
    "combine": 1,
}
"""How long a tile takes, as lesson 6 has it: gate_up is two matrices and down is one. Of a weight gradient, for each
row block of its expert. Rows that travel take as long as down, which is a guess."""

STORES = {
    "forward": {
        "dispatch": ("rows", "row"),
        "gate_up": ("act", "row"),
        "down": ("slots", "slot"),
        "combine": ("y", "token"),
    },
    "backward": {
        "dispatch": ("rows", "row"),
        "gate_up": ("pre", "row"),
        "dact": ("dpre", "row"),
        "dx": ("slots", "slot"),
        "dw_gate_up": ("dw_gate_up", "expert"),
        "dw_down": ("dw_down", "expert"),
        "combine": ("dx", "token"),
    },
}
"""What a kind stores, and what its first axis counts. (Beside dpre, dact stores the weighted act; dispatch pulls rows
of dy beside those of x.)"""

READS = {
    "dispatch": (),
    "gate_up": ("dispatch",),
    "down": ("gate_up",),
    "dact": ("dispatch", "gate_up"),
    "dx": ("dact",),
    "dw_gate_up": ("dispatch", "dact"),
    "dw_down": ("dispatch", "dact"),
    "combine": ("down", "dx"),
}
"""Of whose tiles, if there are any in the launch, a kind reads what they store."""


@dataclass(frozen=True)
class Layer:
    """A layer to step through.

    Attributes:
        name: what the page calls it.
        topk_ids: T lists of K experts; -1 masks a route.
        E: experts.
        H, I: sizes, which decide how many tiles stand side by side, and are not seen otherwise.
        ranks: the numbers of ranks that it can be split over.
    """

    name: str
    topk_ids: list[list[int]]
    E: int
    H: int
    I: int
    ranks: tuple[int, ...]


# Written down rather than drawn: the page's text says how long these take.
EIGHT = [[1, 0], [1, 3], [1, 2], [1, 3], [0, 1], [1, 3], [0, 2], [2, 3]]
TWELVE = [[1, 2], [2, 0], [0, 2], [3, 2], [5, 2], [2, 5], [3, 2], [1, 2], [1, 2], [2, 3], [2, 3], [2, 1]]


def layers() -> list[Layer]:
    """The running example of the lessons first."""
    return [
        Layer("the running example: 4 tokens, 3 experts", [[0, 2], [1, 0], [0, -1], [2, 0]], 3, 2, 1, (1, 3)),
        Layer("8 tokens, 4 experts", EIGHT, 4, 4, 2, (1, 2, 4)),
        Layer("12 tokens, 6 experts, one hot, one empty", TWELVE, 6, 4, 2, (1, 2)),
    ]


TILES = {"2 rows": (2, 1), "2 rows, narrow": (2, 2), "4 rows": (4, 1)}
"""Rows of a row block, and into how many the columns of each product are cut. A combine tile is always two tokens."""


def tiles_of(layer: Layer, rows: int, cuts: int) -> Mega:
    """Tiles for rung mega that are as small as the layer."""
    tiles = mega(rows, N=layer.H, C=16, warps=1, stages=1, chunk=16, group=1)
    narrow = lambda tile, columns: replace(tile, BLOCK_N=max(columns // cuts, 1))
    dw = replace(tiles.dw_down, BLOCK_M=2 * layer.I, BLOCK_N=max(layer.H // cuts, 1))
    return replace(
        tiles,
        gate_up=narrow(tiles.gate_up, layer.I),
        down=narrow(tiles.down, layer.H),
        dact=narrow(tiles.dact, layer.I),
        dx=narrow(tiles.dx, layer.H),
        dw_gate_up=dw,
        dw_down=dw,
        combine=Elementwise(2, 64, 1),
        ahead=2,
    )


# Orders of the same tiles: of each, why one would look at it. The first is the one that the kernels have.

LAGGED = "lagged groups of 1 expert"
MIXED = "lagged groups, phases mixed"


def orders(layer: Layer, work: Work, remade: Callable[[Work], list[list[int]]]) -> dict[str, list[list[int]]]:
    """{name: table}. remade: makes the schedule of a work."""
    W_is_1 = not work.mixed
    table = remade(work)
    found = {LAGGED if W_is_1 else MIXED: table}
    if W_is_1:
        found["lagged groups of 2 experts"] = remade(replace(work, group=2))
        found["all experts in one group"] = remade(replace(work, group=layer.E))
    else:
        found["lagged groups, phases one behind the other"] = remade(replace(work, mixed=False))
    found["expert by expert"] = sorted(table, key=lambda tile: (tile[KIND] == COMBINE, tile[EXPERT], tile[KIND]))
    last = max(n for n, tile in enumerate(table) if tile[KIND] == COMBINE)
    found["wrong: a combine tile at place 3"] = [*table[:3], table[last], *table[3:last], *table[last + 1 :]]
    found["wrong: from last to first"] = table[::-1]
    return found


def case(layer: Layer, direction: str, W: int, tile: str) -> dict:
    """One layer, direction, number of ranks and size of tiles, as JSON:

    ranks, tile         as chosen
    tokens_of_rank      W numbers
    row_start           E+1 numbers, as the plan has them
    token_of_row        of each live row
    slot_of_row         of each live row
    tiles               the schedule, a list of rows whose columns are COLUMNS
    counter             of each tile the counter that it waits for, null where it waits for nothing
    signals             of each tile [counter, how much it adds], for counters that somebody waits for
    reads               of each tile the tiles that store what it reads
    length              of each tile, see LENGTHS
    counters            {counter: its name}
    orders              {name: the numbers of the tiles, in the order of that name}
    """
    work, tokens_of_rank = work_of(layer, direction, W, tile), shares(len(layer.topk_ids), W)
    rows = plan(torch.tensor(layer.topk_ids), layer.E)
    homes = home_of_row(rows, tokens_of_rank)
    live = homes.bincount(minlength=W).tolist()
    tables = orders(layer, work, lambda work: schedule(rows.row_start, tokens_of_rank, live, work).tolist())
    table = next(iter(tables.values()))
    number = {tuple(tile): n for n, tile in enumerate(table)}
    counters = [counter_of(tile, layer.E, work) for tile in table]
    awaited = sorted({counter for counter in counters if counter is not None})
    signals = [signals_of(tile, layer.E, work, homes.tolist()) for tile in table]
    return {
        "ranks": W,
        "tile": tile,
        "tokens_of_rank": tokens_of_rank,
        "row_start": rows.row_start.tolist(),
        "token_of_row": rows.token_of_row[: len(homes)].tolist(),
        "slot_of_row": rows.slot_of_row[: len(homes)].tolist(),
        "tiles": table,
        "counter": counters,
        "signals": [[signal for signal in several if signal[0] in awaited] for several in signals],
        "reads": reads(table, rows),
        "length": [length(tile, work.BLOCK_R) for tile in table],
        "counters": {counter: name_of(counter, layer.E, W, work) for counter in awaited},
        "orders": distinct({name: [number[tuple(tile)] for tile in order] for name, order in tables.items()}),
    }


def work_of(layer: Layer, direction: str, W: int, tile: str) -> Work:
    """What a launch of rung mega has to do."""
    T, tiles = len(layer.topk_ids), tiles_of(layer, *TILES[tile])
    problem = Problem(T, layer.H, layer.I, layer.E, len(layer.topk_ids[0]), device="cpu")
    if W > 1:
        problem = problem.at(tokens_per_rank=shares(T, W), save="inputs")  # over ranks pre is made again
    if direction == "forward":
        return forward_work(problem, tiles)
    return backward_work(problem, tiles, Need(), recompute=problem.save == "inputs")


def reads(table: Sequence[Sequence[int]], rows: Plan) -> list[list[int]]:
    """Of each tile the tiles that store what it reads: of its row block, of its expert, or of its tokens.

    What a tile waits for is coarser: all tiles of its expert, or all rows of its rank.
    """
    token_of_row = rows.token_of_row.tolist()

    def reading(tile: Sequence[int], other: Sequence[int]) -> bool:
        if KINDS[other[KIND]] not in READS[KINDS[tile[KIND]]]:
            return False
        if tile[KIND] == COMBINE:
            tokens = range(tile[ROW], tile[ROW] + tile[ROWS])
            return any(token in tokens for token in token_of_row[other[ROW] : other[ROW] + other[ROWS]])
        if KINDS[tile[KIND]].startswith("dw_"):
            return tile[EXPERT] == other[EXPERT]
        return tile[BLOCK] == other[BLOCK]

    return [[n for n, other in enumerate(table) if reading(tile, other)] for tile in table]


def length(tile: Sequence[int], BLOCK_R: int) -> int:
    """How long a tile takes, at least 1: an expert without rows has weight gradients too, and they are stored."""
    blocks = -(-tile[ROWS] // BLOCK_R) if KINDS[tile[KIND]].startswith("dw_") else 1
    return max(LENGTHS[KINDS[tile[KIND]]] * blocks, 1)


def name_of(counter: int, E: int, W: int, work: Work) -> str:
    """What a counter counts, in words."""
    phase, expert = divmod(counter, E)
    if phase < len(work.phases):
        return f"{KINDS[work.phases[phase].kind]} of expert {expert}"
    return f"rows for rank {counter - len(work.phases) * E}" if W > 1 else "rows for combine"


def distinct(orders: dict[str, list[int]]) -> dict[str, list[int]]:
    """Without orders that are one above under another name."""
    return {name: order for n, (name, order) in enumerate(orders.items()) if order not in list(orders.values())[:n]}


def exported() -> dict:
    """Everything that the stepper knows."""
    return {
        "columns": COLUMNS,
        "kinds": KINDS,
        "step_of_kind": STEP_OF_KIND,
        "colours": COLOURS,
        "stores": STORES,
        "layers": [
            {
                "name": layer.name,
                "E": layer.E,
                "topk_ids": layer.topk_ids,
                "cases": {
                    direction: [case(layer, direction, W, tile) for W in layer.ranks for tile in TILES]
                    for direction in DIRECTIONS
                },
            }
            for layer in layers()
        ],
    }


def as_script() -> str:
    """The text of js/schedules.js. A script and not JSON, for a page that is opened from disk may not fetch."""
    return f"const SCHEDULES = {json.dumps(exported(), separators=(',', ':'))};\n"
