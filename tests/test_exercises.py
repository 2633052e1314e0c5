"""What an exercise says of an answer: where it is off, where to look again, and never what is right."""

import pytest

from mega_moe.exercises import NotYet, check

SEE = ("The plan", "count the routes")


@pytest.mark.parametrize(
    "answer, right",
    [(7, 7), (7.3, 7), (0.17, 0.1678), ([0, 4], [0, 4]), ((3.96, 0.88), [3.9636, 0.8808]), (True, True), (0.0, 0.0)],
)
def test_a_right_answer_passes(answer, right):
    check(answer, right, SEE)
    check(dict(part=answer), dict(part=right), dict(part=SEE))


@pytest.mark.parametrize(
    "answer, right, said",
    [
        (8, 7, "you say 8, which is too large"),
        (6.4, 7, "you say 6.4, which is too small"),
        (0.18, 0.1678, "you say 0.18, which is too large"),
        (0.1, 0.0, "you say 0.1, which is too large"),
        (float("nan"), 0.5, "you say nan, and it is a number"),
        (..., 7, "there is no answer yet"),
        (True, False, "you say True, and it is not"),
        (1, True, "you say 1, and it is not"),
        (True, 1, "you say True, and it is not"),
        ("combine", "down", "you say 'combine', and it is not"),
        (None, 7, "you say None, and it is a number"),
        ([7], 7, r"you say \[7\], and it is a number"),
        (7, [7], "you say 7, and it is a list of another length"),
        ([0, 4], [0, 4, 6], r"you say \[0, 4\], and it is a list of another length"),
        ([0, 5, 6], [0, 4, 7], r"you say \[0, 5, 6\], at place 1 .* too large, at place 2 .* too small"),
    ],
)
def test_a_wrong_answer_hears_what_is_off(answer, right, said):
    with pytest.raises(NotYet, match=f'^not yet\nanswer: {said}\n    look again at "The plan": count the routes$'):
        check(answer, right, SEE)


def test_only_what_is_wrong_is_told_and_not_what_is_right():
    see = dict(rows=SEE, ms=("The kernel", "bytes over bandwidth"))
    with pytest.raises(NotYet) as caught:
        check(dict(rows=12, ms=3.25), dict(rows=12, ms=8.75), see)
    assert str(caught.value).splitlines() == [
        "1 of 2 parts are right",
        "ms: you say 3.25, which is too small",
        '    look again at "The kernel": bytes over bandwidth',
    ]
    with pytest.raises(NotYet, match="0 of 2 parts are right\nrows: there is no answer yet"):
        check({}, dict(rows=12, ms=8.75), see)
    with pytest.raises(NotYet, match=r"the answer has parts: write dict\(rows=\.\.\., ms=\.\.\.\)"):
        check(12, dict(rows=12, ms=8.75), see)
