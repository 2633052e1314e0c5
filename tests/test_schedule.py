"""The schedule: every tile once, every wait backwards, and nobody ever waits for what will not be done."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise, product
from math import ceil
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("hypothesis")  # a bare checkout on a GPU may not have it
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_moe import schedule as schedules
from mega_moe.routing import plan
from mega_moe.schedule import (
    ARRIVALS,
    COLUMNS,
    COMBINE,
    EXPERT,
    KIND,
    KINDS,
    RANK,
    ROW,
    STEP_OF_KIND,
    Phase,
    Work,
    counter_of,
    first_block_of_expert,
    home_of_row,
    mix,
    most_tiles,
    number_of_counters,
    schedule,
    signals_of,
    weave,
    with_dispatch,
)
from mega_moe.shapes import Plan, Problem
from mega_moe.simulate import Deadlock, Simulation, Span, by_ticket, in_words, play, steps_of
from mega_moe.timeline import STEPS, Bar, svg


def phases(**strips: int) -> tuple[Phase, ...]:
    return tuple(Phase(KINDS.index(kind), number) for kind, number in strips.items())


def work_of(over_rows: dict[str, int], weight_grads: dict[str, int] | None = None, **changes) -> Work:
    """Small blocks; weight gradients wait for dact."""
    names = list(over_rows)
    facts = dict(BLOCK_R=2, combine=True, BLOCK_T=2, group=2, ahead=1)
    facts["waits_for"] = names.index("dact") if "dact" in names else 0
    return Work(phases=phases(**over_rows), weight_grads=phases(**weight_grads or {}), **facts | changes)


WORKS = {
    "forward": work_of(dict(gate_up=2, down=1)),
    "forward with dispatch": work_of(dict(dispatch=1, gate_up=3, down=2), BLOCK_R=3, BLOCK_T=1, group=1, mixed=True),
    "backward": work_of(dict(dact=2, dx=3), dict(dw_gate_up=2, dw_down=1)),
    "backward with all": work_of(
        dict(dispatch=2, gate_up=1, dact=2, dx=1), dict(dw_gate_up=1, dw_down=2), ahead=4, mixed=True
    ),
    "dw_down alone": work_of(dict(dact=1), dict(dw_down=2), combine=False),
    "router weights alone": work_of(dict(dact=2), group=5),
}
every_work = pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))


def route(ids: list[list[int]], E: int, tokens_of_rank: tuple[int, ...], K: int = 2) -> tuple[Plan, list[int]]:
    """The plan, and the home of each row."""
    p = plan(torch.tensor(ids, dtype=torch.int64).view(-1, K), E)
    return p, home_of_row(p, tokens_of_rank).tolist()


def table_of(p: Plan, homes: list[int], tokens_of_rank: tuple[int, ...], work: Work) -> list[list[int]]:
    live = [homes.count(rank) for rank in range(len(tokens_of_rank))]
    table = schedule(p.row_start, tokens_of_rank, live, work)
    assert table.dtype == torch.int32 and table.shape[1:] == (len(COLUMNS),)
    return table.tolist()


# The worked example, and the sizes of things.


def test_example_in_the_docstring():
    """The table of mega_moe/schedule.py's first page."""
    work = work_of(dict(gate_up=1, down=1), ahead=0)
    got = schedule(torch.tensor([0, 1, 1, 4], dtype=torch.int32), [3], [4], work).tolist()
    lines = [line.split() for line in schedules.__doc__.splitlines()]
    assert list(COLUMNS) in lines
    table = [line for line in lines if line and line[0] in KINDS and all(word.isdigit() for word in line[1:8])]
    assert got == [[KINDS.index(kind), *map(int, numbers[:7])] for kind, *numbers in table]


def test_example_of_the_tail():
    """Five weight gradients and two combine tiles; fewer than `ahead`; none."""
    assert weave(["w0", "w1", "w2", "w3", "w4"], ["c0", "c1"], 1) == ["w0", "c0", "w1", "w2", "c1", "w3", "w4"]
    assert weave(["w0", "w1"], ["c0", "c1", "c2"], 5) == ["w0", "w1", "c0", "c1", "c2"]
    assert weave(["w0", "w1"], ["c0", "c1", "c2", "c3"], 0) == ["c0", "w0", "c1", "w1", "c2", "c3"]
    assert weave([], ["c0", "c1"], 3) == ["c0", "c1"] and weave(["w0"], [], 3) == ["w0"] and weave([], [], 0) == []


def test_example_of_mixing():
    """Two tiles and four; of those at the same place the lower phase first; a phase of none, and none at all."""
    assert mix([["d0", "d1"], ["g0", "g1", "g2", "g3"]]) == ["g0", "d0", "g1", "g2", "d1", "g3"]
    assert mix([["d0"], ["g0"], ["w0", "w1", "w2"]]) == ["w0", "d0", "g0", "w1", "w2"]
    assert mix([[], ["g0", "g1"]]) == ["g0", "g1"] and mix([[], []]) == mix([]) == []


def test_where_a_mixed_tile_stands_can_be_computed():
    """As a program does that knows only its own number: before tile i of n stand, of the m tiles of another phase,
    ((2i + 1) m + n) // 2n if it is a lower phase, and else ((2i + 1) m + n - 1) // 2n."""
    for sizes in [*product(range(7), repeat=3), (1000, 24, 3), (65, 64, 63)]:
        order = mix([[(p, i) for i in range(n)] for p, n in enumerate(sizes)])
        place = {tile: number for number, tile in enumerate(order)}
        for (p, i), n in ((tile, sizes[tile[0]]) for tile in order):
            before = [((2 * i + 1) * m + n - (q >= p)) // (2 * n) for q, m in enumerate(sizes)]
            assert place[p, i] == sum(before) and before[p] == i


def test_where_a_tile_of_the_tail_stands_can_be_computed():
    """As a program does that knows only its own number: combine j is number d_j + j of the tail, weight gradient i is
    number i and the combine tiles before it."""
    for D, C, ahead in product(range(7), range(5), range(8)):
        tail = weave([("w", i) for i in range(D)], [("c", j) for j in range(C)], ahead)
        first = min(ahead, D)
        step = max((D - first) // max(C, 1), 1)
        assert all(tail[min(first + j * step, D) + j] == ("c", j) for j in range(C))
        assert all(tail[i + min(max((i - first) // step + 1, 0), C)] == ("w", i) for i in range(D))
        assert len(tail) == D + C


def test_the_home_of_a_row():
    p, homes = route([[2, 0], [0, -1], [2, 2]], 3, (1, 2))
    assert p.token_of_row.tolist() == [0, 1, 0, 2, 2, -1] and homes == [0, 1, 0, 1, 1]
    assert route([[2, 0], [0, -1], [2, 2]], 3, (0, 3, 0))[1] == [1] * 5
    assert route([], 3, (0, 0))[1] == []


def test_ranks_that_cannot_share_experts_and_routes_that_are_not_there_are_refused():
    row_start = torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 experts cannot be shared evenly by 2 ranks"):
        schedule(row_start, [1, 2], [2, 2], WORKS["forward"])
    with pytest.raises(ValueError, match="1 numbers that add up to 4 rows"):
        schedule(row_start, [3], [5], WORKS["forward"])
    with pytest.raises(ValueError, match="live_routes_of_rank"):
        schedule(row_start, [1, 1, 1], [4], WORKS["forward"])


def test_every_kind_belongs_to_one_of_the_five_steps():
    assert set(STEP_OF_KIND) == set(KINDS) and set(STEP_OF_KIND.values()) == set(STEPS)
    assert all(kind == step for kind, step in STEP_OF_KIND.items() if kind in STEPS)


# Every tile once, in the specified order, and every wait points backwards.


def assert_specified(ids, E: int, tokens_of_rank: tuple[int, ...], work: Work, K: int = 2) -> None:
    p, homes = route(ids, E, tokens_of_rank, K)
    table = table_of(p, homes, tokens_of_rank, work)
    assert table == expected_table(p.row_start.tolist(), homes, tokens_of_rank, work)
    assert_waits_point_backwards(table, homes, E, len(tokens_of_rank), work)

    rows = p.row_start.diff().tolist()
    row_blocks = sum(ceil(number / work.BLOCK_R) for number in rows)
    combines = sum(ceil(tokens / work.BLOCK_T) for tokens in tokens_of_rank) * work.combine
    strips = lambda several: sum(phase.strips for phase in several)
    assert len(table) == row_blocks * strips(work.phases) + E * strips(work.weight_grads) + combines
    assert len(table) <= most_tiles(len(p.token_of_row), E, tokens_of_rank, work)


def expected_table(starts: list[int], homes: list[int], tokens_of_rank: tuple[int, ...], work: Work) -> list[list[int]]:
    """All tiles in any order, each with its place in the order, sorted by it."""
    E, W = len(starts) - 1, len(tokens_of_rank)
    rows = [starts[e + 1] - starts[e] for e in range(E)]
    blocks = [len(range(0, number, work.BLOCK_R)) for number in rows]
    over_rows, gradients, combines = [], [], []
    for e in range(E):
        rank, local = divmod(e, E // W)
        group = local // work.group
        for b in range(blocks[e]):
            block, row = sum(blocks[:e]) + b, starts[e] + b * work.BLOCK_R
            for p, phase in enumerate(work.phases):
                arrivals = blocks[e] * work.phases[p - 1].strips * (p > 0)
                for column in range(phase.strips):
                    tile = [phase.kind, rank, e, block, row, min(starts[e + 1] - row, work.BLOCK_R), column, arrivals]
                    over_rows.append(((group + p, p, rank, e, block, column), tile))
        for n, phase in enumerate(work.weight_grads):
            arrivals = blocks[e] * work.phases[work.waits_for].strips
            for column in range(phase.strips):
                tile = [phase.kind, rank, e, sum(blocks[:e]), starts[e], rows[e], column, arrivals]
                gradients.append(((-rows[e], e, n, column), tile))
    for rank in reversed(range(W if work.combine else 0)):
        before = sum(tokens_of_rank[:rank])
        for t in range(before, before + tokens_of_rank[rank], work.BLOCK_T):
            tokens = min(before + tokens_of_rank[rank] - t, work.BLOCK_T)
            blocks_before = sum(ceil(number / work.BLOCK_T) for number in tokens_of_rank[:rank])
            block, arrivals = blocks_before + (t - before) // work.BLOCK_T, homes.count(rank) * work.phases[-1].strips
            combines.append(((rank, block), [COMBINE, rank, 0, block, t, tokens, 0, arrivals]))
    in_order = lambda several: [tile for _, tile in sorted(several)]
    if work.mixed:
        in_phase, mixed = groupby(sorted(over_rows), key=lambda keyed: keyed[0][:2]), []
        for (turn, p), keyed in ((phase, list(several)) for phase, several in in_phase):
            places = [(turn, Fraction(2 * i + 1, 2 * len(keyed)), p) for i in range(len(keyed))]
            mixed += [(place, tile) for place, (_, tile) in zip(places, keyed)]
        over_rows = mixed
    return in_order(over_rows) + weave(in_order(gradients), in_order(combines), work.ahead)


def assert_waits_point_backwards(table: list[list[int]], homes: list[int], E: int, W: int, work: Work) -> None:
    """Whoever walks the table in order finds every counter where it has to be, at once; and in the end nothing has
    arrived that nobody counted on."""
    counters = [0] * number_of_counters(E, W, work)
    for n, tile in enumerate(table):
        counter = counter_of(tile, E, work)
        assert (counter is None) == (tile[ARRIVALS] == 0)
        assert counter is None or counters[counter] == tile[ARRIVALS], f"tile {n} waits for a later one"
        for signalled, arrivals in signals_of(tile, E, work, homes):
            assert arrivals > 0
            counters[signalled] += arrivals
    tiles = Counter((tile[KIND], tile[EXPERT]) for tile in table)
    for p, phase in enumerate(work.phases):
        assert counters[p * E : (p + 1) * E] == [tiles[phase.kind, e] for e in range(E)]
    sent_home = [homes.count(rank) * work.phases[-1].strips * work.combine for rank in range(W)]
    assert counters[len(work.phases) * E :] == sent_home


@every_work
@pytest.mark.parametrize(
    "ids, E, tokens_of_rank",
    [
        ([[2, 0], [0, -1], [2, 2]], 3, (3,)),
        ([[0, 0]] * 5, 1, (5,)),  # one expert
        ([[3, 1]] * 7, 6, (7,)),  # most experts are empty
        ([[0, 1], [2, 3], [1, 2], [0, 3]], 4, (3, 1)),
        ([[0, 1], [2, 3], [1, 2], [0, 3]], 4, (0, 4, 0, 0)),  # ranks without tokens
        ([[2, 3]] * 4, 4, (1, 3)),  # a rank whose experts nobody visits
        ([[5, 4], [5, 0], [5, 5], [-1, 7], [-1, -1]], 8, (1, 0, 2, 2)),  # a rank whose routes are all masked
        ([], 4, (0,)),
        ([], 4, (0, 0)),
        ([[-1, -1]] * 3, 4, (2, 1)),
    ],
    ids=str,
)
def test_tiles_order_and_waits(ids, E, tokens_of_rank, work):
    assert_specified(ids, E, tokens_of_rank, work)


def test_example_of_first_blocks():
    assert first_block_of_expert([0, 1, 1, 4], 2) == [0, 1, 1, 3]


def test_work_over_ranks_begins_with_dispatch_and_is_mixed():
    assert not WORKS["backward"].mixed
    work = with_dispatch(WORKS["backward"], strips=2)
    assert work.mixed
    assert [KINDS[phase.kind] for phase in work.phases] == ["dispatch", "dact", "dx"] and work.phases[0].strips == 2
    assert work.phases[work.waits_for].kind == KINDS.index("dact")
    assert_specified([[0, 1], [2, 3], [1, -1]], 4, (2, 1), work)


few = settings(max_examples=40, derandomize=True, deadline=None, database=None)


@st.composite
def routings(draw):
    """ids, E, tokens_of_rank and K: experts shared by ranks, ids drawn one by one, so likely to repeat, to leave
    experts and ranks empty and to be masked."""
    W, L, K = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tokens_of_rank = tuple(draw(st.lists(st.integers(0, 9), min_size=W, max_size=W)))
    T, id_ = sum(tokens_of_rank), st.integers(-1, W * L - 1)
    ids = draw(st.lists(st.lists(id_, min_size=K, max_size=K), min_size=T, max_size=T))
    return ids, W * L, tokens_of_rank, K


@st.composite
def works(draw):
    """Any work: kinds in their order, any of them left out, with blocks of any size."""
    size = st.integers(1, 4)
    over_rows = draw(st.sampled_from([("gate_up", "down"), ("dact",), ("dact", "dx"), ("gate_up", "dact", "dx")]))
    if draw(st.booleans()):
        over_rows = ("dispatch", *over_rows)
    gradients = draw(st.sampled_from([(), ("dw_gate_up",), ("dw_down",), ("dw_gate_up", "dw_down")]))
    return work_of(
        {kind: draw(size) for kind in over_rows},
        {kind: draw(size) for kind in gradients if "dact" in over_rows},
        BLOCK_R=draw(size),
        BLOCK_T=draw(size),
        combine=draw(st.booleans()),
        group=draw(size),
        ahead=draw(st.integers(0, 9)),
        mixed=draw(st.booleans()),
    )


@few
@given(routings(), works())
def test_any_routing_and_any_work(routing, work):
    ids, E, tokens_of_rank, K = routing
    assert_specified(ids, E, tokens_of_rank, work, K)


@few
@given(routings(), works())
def test_mixed_phases_go_on_evenly(routing, work):
    """Wherever a turn is cut, its phases have done the same share of their tiles, to within half a tile of each. And
    the turn has the same tiles as where phases stand one behind the other, of each phase in the same order."""
    ids, E, tokens_of_rank, K = routing
    p, homes = route(ids, E, tokens_of_rank, K)
    turns = {}
    for mixed in (False, True):
        table = table_of(p, homes, tokens_of_rank, replace(work, mixed=mixed))
        turns[mixed] = turns_of(table, E // len(tokens_of_rank), work)
    assert [*turns[True]] == [*turns[False]] == sorted(turns[True])
    for number, turn in turns[True].items():
        assert sorted(turn, key=lambda tile: tile[KIND]) == turns[False][number]  # kinds ascend with phases
        sizes, done = Counter(tile[KIND] for tile in turn), Counter()
        for tile in turn:
            done[tile[KIND]] += 1
            at_least = max(Fraction(2 * done[kind] - 1, 2 * n) for kind, n in sizes.items())
            at_most = min(Fraction(2 * done[kind] + 1, 2 * n) for kind, n in sizes.items())
            assert at_least <= at_most


def turns_of(table: list[list[int]], L: int, work: Work) -> dict[int, list[list[int]]]:
    """The tiles over rows, by turn, as they come. Raises where a turn has come to its end twice."""
    number_of = {phase.kind: p for p, phase in enumerate(work.phases)}
    over_rows = [tile for tile in table if tile[KIND] in number_of]
    turn_of = lambda tile: tile[EXPERT] % L // work.group + number_of[tile[KIND]]
    turns = [(turn, list(tiles)) for turn, tiles in groupby(over_rows, key=turn_of)]
    assert len(dict(turns)) == len(turns)
    return dict(turns)


# Programs: a schedule always ends, whoever draws, however few, however slow.


def played(ids, E, tokens_of_rank, work, programs: int, seed: int, K: int = 2) -> None:
    """Tiles take random times; every tile is done once, and starts when what it waits for is there."""
    p, homes = route(ids, E, tokens_of_rank, K)
    table, W = table_of(p, homes, tokens_of_rank, work), len(tokens_of_rank)
    steps = [random.Random(seed + n).choice([1, 2, 50]) for n in range(len(table))]
    spans = play(table, work, E, W, homes, by_ticket(table, W, programs), steps)
    assert sorted(span.tile for span in spans) == list(range(len(table)))
    done = {span.tile: span for span in spans}
    for span in spans:
        assert span.drawn <= span.start and span.end == span.start + steps[span.tile]
        assert table[span.tile][RANK] == span.program // programs
    for tile, span in done.items():
        counter = counter_of(table[tile], E, work)
        arrivals = [
            (done[other].end, arrived)
            for other in range(len(table))
            for signalled, arrived in signals_of(table[other], E, work, homes)
            if signalled == counter
        ]
        assert sum(arrived for end, arrived in arrivals if end <= span.start) >= table[tile][ARRIVALS]


@every_work
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_number_of_programs_comes_to_the_end(programs, work):
    ids = [[5, 4], [5, 0], [5, 5], [3, 7], [-1, 2], [5, 1]]
    for seed, tokens_of_rank in enumerate([(6,), (4, 2), (0, 3, 1, 2)]):
        played(ids, 8, tokens_of_rank, work, programs, seed)


@few
@given(routings(), works(), st.integers(1, 6), st.integers(0, 99))
def test_any_schedule_comes_to_the_end(routing, work, programs, seed):
    ids, E, tokens_of_rank, K = routing
    played(ids, E, tokens_of_rank, work, programs, seed, K)


def of_processes(ids, E: int, tokens_of_rank: tuple[int, ...], work: Work, K: int) -> list[list[list[int]]]:
    """The tables of W processes, each made from the rows of its own experts and from its own tokens, with experts and
    ranks numbered over all: a rank waits in combine for the routes of its own tokens, whoever has their experts."""
    p, homes = route(ids, E, tokens_of_rank, K)
    starts, L, tables = p.row_start.tolist(), E // len(tokens_of_rank), []
    for rank, tokens in enumerate(tokens_of_rank):
        own = p.row_start[rank * L : (rank + 1) * L + 1]
        table = schedule(own - own[0], [tokens], [int(own[-1] - own[0])], work).tolist()
        for tile in table:
            tile[RANK] = rank
            if tile[KIND] == COMBINE:
                tile[ARRIVALS] = homes.count(rank) * work.phases[-1].strips
            else:
                tile[EXPERT] += rank * L
                tile[ROW] += starts[rank * L]
        tables.append(table)
    return tables


@few
@given(routings(), works(), st.integers(1, 4), st.integers(0, 99))
def test_the_tables_of_processes_are_parts_of_one_order(routing, work, programs, seed):
    """Turn by turn, rank by rank, and then the tails: of all processes' tiles this is one order in which waits point
    backwards, and each process has its part of it, in that order. So all come to the end, whoever is slow."""
    ids, E, tokens_of_rank, K = routing
    homes, W, L = route(ids, E, tokens_of_rank, K)[1], len(tokens_of_rank), E // len(tokens_of_rank)
    tables = of_processes(ids, E, tokens_of_rank, work, K)
    turns = [turns_of(table, L, work) for table in tables]
    over_rows = [turns[r].get(turn, []) for turn in sorted({t for each in turns for t in each}) for r in range(W)]
    kinds = {phase.kind for phase in work.phases}
    tails = [[tile for tile in table if tile[KIND] not in kinds] for table in tables]
    merged = [tile for part in [*over_rows, *tails] for tile in part]
    assert_waits_point_backwards(merged, homes, E, W, work)
    assert [[tile for tile in merged if tile[RANK] == rank] for rank in range(W)] == tables

    steps = [random.Random(seed + n).choice([1, 2, 50]) for n in range(len(merged))]
    assert len(play(merged, work, E, W, homes, by_ticket(merged, W, programs), steps)) == len(merged)


def test_two_tables_each_right_by_itself_deadlock_each_other():
    """Combine tiles may move up to where their last row is made. Where one rank takes the first group first and the
    other the second, each table is right by itself, for the order in which its own rank would take the groups on all
    ranks; and each rank waits in combine, before it has done what the other waits for. In one common order, whichever,
    nobody does.
    """
    work, E, W = work_of(dict(down=1), group=1), 4, 2
    p, homes = route([[2, 2], [2, 2], [1, 1], [1, 1]], E, (2, 2))
    table = table_of(p, homes, (2, 2), work)
    group_of = lambda tile: tile[EXPERT] % (E // W)
    last_group = [group_of({EXPERT: 2}), group_of({EXPERT: 1})]  # what makes the rows of rank 0, and of rank 1

    def in_order(groups: list[int]) -> list[int]:
        """All ranks' tiles group by group, each rank's combine tile as soon as all of its rows are on their way."""
        order = []
        for group in groups:
            order += [n for n, tile in enumerate(table) if tile[KIND] != COMBINE and group_of(tile) == group]
            order += [n for n, tile in enumerate(table) if tile[KIND] == COMBINE and last_group[tile[RANK]] == group]
        return order

    def of_rank(rank: int, order: list[int]) -> list[int]:
        return [n for n in order if table[n][RANK] == rank]

    assert last_group == [0, 1]
    first, second = in_order([0, 1]), in_order([1, 0])
    assert sorted(first) == sorted(second) == list(range(len(table)))
    for order in (first, second):
        assert_waits_point_backwards([table[n] for n in order], homes, E, W, work)
        draws = [iter(of_rank(rank, order)) for rank in range(W)]
        assert len(play(table, work, E, W, homes, draws, [1] * len(table))) == len(table)
    draws = [iter(of_rank(0, first)), iter(of_rank(1, second))]
    with pytest.raises(
        Deadlock, match="0 waits with combine of rank 0, block 0; program 1 waits with combine of rank 1"
    ):
        play(table, work, E, W, homes, draws, [1] * len(table))


def test_tiles_dealt_out_beforehand_deadlock_where_not_all_programs_are_on_the_device():
    """Program n of four does tiles n, n+4, ... and the device holds only two of them: those wait for tiles of programs
    that start when they end. By ticket the same two come to the end, because no tile belongs to anybody beforehand."""
    work, E = WORKS["forward"], 2
    p, homes = route([[0, 1]] * 6, E, (6,))
    table = table_of(p, homes, (6,), work)
    dealt = lambda programs: [iter(range(n, len(table), programs)) for n in range(programs)]
    steps = [1] * len(table)
    assert len(play(table, work, E, 1, homes, dealt(4), steps)) == len(table)
    with pytest.raises(Deadlock, match="program 0 waits with"):
        play(table, work, E, 1, homes, dealt(4), steps, resident=2)
    spans = play(table, work, E, 1, homes, by_ticket(table, 1, 4), steps, resident=2)
    assert len(spans) == len(table) and {span.program for span in spans} == {0, 1}


# Played by hand.


def test_example_of_a_simulation():
    """The table of mega_moe/schedule.py's first page, two programs, gate_up 4 steps a tile, down 2, combine 1.

    Program 0 does tiles 0, 2 and 4 (gate_up of expert 0 until 4, of expert 2 until 8, down of it until 10), program 1
    tiles 1 and 3 (gate_up of expert 2 until 4, down of expert 0 until 6), and draws down of expert 2 at 6, which waits
    until 8 for gate_up of expert 2.
    """
    work = work_of(dict(gate_up=1, down=1), ahead=0)
    table = schedule(torch.tensor([0, 1, 1, 4], dtype=torch.int32), [3], [4], work).tolist()
    steps = [{"gate_up": 4, "down": 2, "combine": 1}[KINDS[tile[KIND]]] for tile in table]
    spans = play(table, work, 3, 1, [0] * 4, by_ticket(table, 1, 2), steps)
    assert spans == [
        Span(0, 0, 0, 0, 4),
        Span(1, 1, 0, 0, 4),
        Span(1, 3, 4, 4, 6),
        Span(0, 2, 4, 4, 8),
        Span(1, 4, 6, 8, 10),
        Span(0, 5, 8, 8, 10),
        Span(1, 6, 10, 10, 11),
        Span(0, 7, 10, 10, 11),
    ]
    simulation = Simulation({"W": 1}, "forward", work, table, 2, spans)
    assert simulation.steps == 11 and simulation.busy == 20 / 22 and simulation.waiting == 2 / 22
    assert simulation.kinds() == {
        "gate_up": dict(tiles=3, waited=0, steps=12, waiting=0),
        "down": dict(tiles=3, waited=1, steps=6, waiting=2),
        "combine": dict(tiles=2, waited=0, steps=2, waiting=0),
    }
    assert in_words(table[5]) == "down of expert 2, block 2" and in_words(table[7]) == "combine of rank 0, block 1"


def test_nothing_to_do_takes_no_time():
    simulation = Simulation({"W": 2}, "forward", WORKS["forward"], [], 3, play([], WORKS["forward"], 4, 2, [], [], []))
    assert (simulation.steps, simulation.busy, simulation.waiting, simulation.kinds()) == (0, 0, 0, {})


def test_a_tile_takes_as_many_steps_as_its_product():
    """Tiles of the interpreter: pieces are 32 rows by 64, strips of gate_up and down two tiles of 32 and 64 columns."""
    tiles = pytest.importorskip("mega_moe.kernels.blocks").INTERPRETER.mega  # the rest of this file needs no Triton
    problem = Problem(T=20, H=130, I=70, E=1, K=2)
    work = work_of(dict(dispatch=1, gate_up=2, down=2, dact=2, dx=3), dict(dw_gate_up=1, dw_down=1), BLOCK_R=32)
    tile = lambda kind, column=0, rows=32: [KINDS.index(kind), 0, 0, 0, 0, rows, column, 0]
    took = {
        (kind, *where): steps_of([tile(kind, *where)], work, problem, tiles)[0]
        for kind, *where in [
            ("dispatch",),
            *(("gate_up", column) for column in (0, 1)),
            *(("down", column) for column in (0, 1)),
            ("dact",),
            ("dx",),
            ("dw_down", 0, 33),
            ("dw_gate_up", 0, 0),
            ("combine", 0, 20),
        ]
    }
    assert took == {
        ("dispatch",): 3,  # 130 columns, 64 a step
        ("gate_up", 0): 2 * 3,  # 3 tiles of 32 columns: two, each 130 deep, and one
        ("gate_up", 1): 3,
        ("down", 0): 2 * 2,  # 3 tiles of 64 columns: two, each 70 deep, and one
        ("down", 1): 2,
        ("dact",): 3,
        ("dx",): 3,  # 140 deep
        ("dw_down", 0, 33): 2,  # rows, 32 a step
        ("dw_gate_up", 0, 0): 1,  # zeros to store
        ("combine", 0, 20): 3,  # 20 tokens of 2 slots of 130 columns: 5,200 elements, 2,048 a step
    }


SVG = "{http://www.w3.org/2000/svg}"


def test_a_timeline_shows_tiles_where_they_are_and_waiting_before_them():
    """Two lanes of 50 units: half of the first is waiting; a name is escaped, and one that has no room left out."""
    bars = [Bar(0, 0, 25, 50, "down", "a & b"), Bar(1, 10, 10, 11, "combine", "far too long for it")]
    root = ElementTree.fromstring(svg(bars, ["one", "two"], "<title>", "what is seen", "µs"))
    paths = {path.get("class") or path.get("fill"): path.get("d") for path in root.iter(f"{SVG}path")}
    assert set(paths) == {"lane", "url(#waiting)", "down", "combine"}
    left, width = float(paths["lane"][1:].split()[0]), 1012
    assert paths["down"].startswith(f"M{left + width / 2:.2f} 74.00h{width / 2 - 0.6:.2f}v25.40")
    assert paths["url(#waiting)"].startswith(f"M{left:.2f} 74.00h{width / 2 - 0.6:.2f}v")
    assert paths["combine"].startswith(f"M{left + width / 5:.2f} 100.00h{width / 50 - 0.6:.2f}v")
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words[:4] == ["<title>", "down", "combine", "waiting"] and words[-2:] == ["one", "two"]
    assert "a & b" in words and "far too long for it" not in words and "µs" in words
    assert [word for word in words if word.isdigit()] == [
        "0",
        "5",
        "10",
        "15",
        "20",
        "25",
        "30",
        "35",
        "40",
        "45",
        "50",
    ]


@pytest.mark.parametrize("lanes", [1, 40, 132, 1056])
def test_names_of_lanes_do_not_lie_on_each_other(lanes):
    bars = [Bar(lane, 0, 0, 1, "gate_up", "gate_up 0") for lane in range(lanes)]
    root = ElementTree.fromstring(svg(bars, [f"lane {n}" for n in range(lanes)], "t", "d", "steps"))
    at = [float(text.get("y")) for text in root.iter(f"{SVG}text") if text.text.startswith("lane")]
    assert at[0] < 100 and all(other - one > 12 for one, other in pairwise(at)) and int(root.get("height")) < 1000
