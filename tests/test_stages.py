"""Every rung computes what the reference computes, over the whole table of cases."""

from dataclasses import replace
from functools import lru_cache

import pytest
from cases import AXES, DTYPES, SHAPES, Case, covering_array, every_case, pairs_of, poisoned, possible_pairs, run

from mega_moe.parity import Oracle, Parity
from mega_moe.registry import Rung


@lru_cache(256)
def oracle_of(case: Case) -> Oracle:
    """The truth of a case, once for all rungs."""
    return Oracle(*case.layer())


def parity(rung: Rung, case: Case) -> Parity:
    """The verdict on the rung's y and gradients."""
    oracle = oracle_of(replace(case, save="pre"))  # the truth does not depend on it
    with poisoned(case.poison):
        y, grads = run(rung, case.problem(), oracle.inputs, oracle.dy)
    return oracle.check(y, grads)


@pytest.mark.parametrize("case", covering_array(), ids=str)
def test_parity(case, rung):
    verdict = parity(rung, case)
    assert verdict.passed, verdict.shares


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity_of_all_combinations(shape, dtype, rung):
    cases = every_case(shape=shape, dtype=dtype)
    if not cases:
        pytest.skip(f"{shape} layers are not judged in {dtype}")
    verdicts = {str(case): parity(rung, case) for case in cases}
    over = {name: verdict.shares for name, verdict in verdicts.items() if not verdict.passed}
    assert not over, f"{len(over)} of {len(cases)} cases"


def test_every_pair_of_values_is_in_some_case():
    cases = covering_array()
    seen = {pair for case in cases for pair in pairs_of(vars(case))}
    assert seen == set(possible_pairs())
    assert len(cases) <= 60
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in cases} == set(values)


def test_every_case_has_a_name_of_its_own():
    for cases in (covering_array(), every_case()):
        assert len({str(case) for case in cases}) == len(set(cases)) == len(cases)
