"""What the stepper is given to step through; that it does with it what `play` does, tests/test_browser.py sees."""

import json

import pytest

pytest.importorskip("triton", reason="what a launch has to do is said beside its kernels, in Triton")

from export_schedules import DIRECTIONS, TILES, as_script, case, exported, layers

from mega_moe.schedule import ARRIVALS, COLUMNS, COMBINE, KIND, KINDS, RANK

LAYERS = layers()
cases = [
    pytest.param(layer, direction, W, tile, id=f"{len(layer.topk_ids)} tokens, {W} ranks, {tile}, {direction}")
    for layer in LAYERS
    for direction in DIRECTIONS
    for W in layer.ranks
    for tile in TILES
]
every_case = pytest.mark.parametrize("layer, direction, W, tile", cases)


def earlier(before: list[list[int]], order: list[int]) -> bool:
    """Whether each tile's `before` stand before it in the order."""
    place = {n: place for place, n in enumerate(order)}
    return all(place[other] < place[n] for n, others in enumerate(before) for other in others)


@every_case
def test_a_wait_is_for_all_that_a_tile_reads(layer, direction, W, tile):
    """What a tile reads is stored by tiles that its wait, or a wait of theirs, is for. Its counter reaches its arrivals
    when all have added to it, and no sooner."""
    one = case(layer, direction, W, tile)
    signals = [dict(several) for several in one["signals"]]
    awaited = [
        [other for other, adds in enumerate(signals) if counter in adds] if counter is not None else []
        for counter in one["counter"]
    ]
    before = []  # of each tile all that is done when it begins
    for n, others in enumerate(awaited):
        before.append(set(others).union(*(before[other] for other in others)))
        assert before[n].issuperset(one["reads"][n])
        total = sum(signals[other][one["counter"][n]] for other in others)
        assert total == one["tiles"][n][ARRIVALS]
    assert any(one["reads"]) and all(len(tile) == len(COLUMNS) for tile in one["tiles"])


@every_case
def test_orders_are_of_the_same_tiles_and_wrong_ones_wait_forwards(layer, direction, W, tile):
    one = case(layer, direction, W, tile)
    tiles = list(range(len(one["tiles"])))

    assert next(iter(one["orders"].values())) == tiles
    assert len(one["orders"]) >= 4
    for name, order in one["orders"].items():
        assert sorted(order) == tiles
        assert earlier(one["reads"], order) == (not name.startswith("wrong: ")), name


@every_case
def test_every_token_and_every_expert_gets_its_results(layer, direction, W, tile):
    """Combine tiles are of all tokens, each on its home; weight gradients of all experts, also those without rows."""
    one = case(layer, direction, W, tile)
    combined = [t for t in one["tiles"] if t[KIND] == COMBINE]
    assert sum(t[COLUMNS.index("rows")] for t in combined) == len(layer.topk_ids) == sum(one["tokens_of_rank"])
    assert {t[RANK] for t in one["tiles"]} == set(range(W))
    for kind in ("dw_gate_up", "dw_down"):
        experts = {t[COLUMNS.index("expert")] for t in one["tiles"] if KINDS[t[KIND]] == kind}
        assert experts == (set(range(layer.E)) if direction == "backward" else set())


def test_the_running_example_is_that_of_the_lessons():
    """Rows, reads and waits as a reader finds them with a pencil: expert 0 has tokens 0 to 3, in two blocks."""
    one = case(LAYERS[0], "forward", 1, "2 rows")
    assert one["row_start"] == [0, 4, 5, 7] and one["token_of_row"] == [0, 1, 2, 3, 1, 0, 3]
    kinds = [KINDS[tile[KIND]] for tile in one["tiles"]]
    assert kinds == ["gate_up"] * 3 + ["down"] * 2 + ["gate_up"] + ["down"] * 2 + ["combine"] * 2
    assert one["reads"] == [[], [], [], [0], [1], [], [2], [5], [3, 6, 7], [4, 7]]
    assert [one["counters"].get(counter) for counter in one["counter"][3:5]] == ["gate_up of expert 0"] * 2


def test_the_script_holds_what_is_exported():
    script = as_script()
    assert script.startswith("const SCHEDULES = ") and script.endswith(";\n")
    assert json.loads(script[len("const SCHEDULES = ") : -2]) == json.loads(json.dumps(exported()))
