"""Wrong answers to exercises: each is off in one place, and the check behind it is left as it is."""

import pytest
from answers import wrong


@pytest.mark.parametrize(
    "answer, others",
    [
        ("3", ["4"]),
        ("0.5", ["0.55"]),
        ("0.0", ["0.1"]),
        ("True", ["False"]),
        ("'combine'", ["'not combine'"]),
        ("[1, True]", ["[2, True]", "[1, False]"]),
        ("dict(rows=7)", ["dict(rows=8)"]),
        ("lambda s, B: s // B + 2", ["lambda s, B: s // B - 2", "lambda s, B: s * B + 2", "lambda s, B: s // B + 3"]),
        ("lambda T: T <= 5", ["lambda T: T > 5", "lambda T: T <= 6"]),
    ],
)
def test_a_wrong_answer_is_off_in_one_place(answer, others):
    check = "assert answer\nprint(answer)"
    made = wrong(f"answer = {answer}\n{check}")

    assert all(source.endswith(f"\n{check}") for source in made)
    assert [source.removeprefix("answer = ").removesuffix(f"\n{check}") for source in made] == others


def test_an_answer_over_several_lines_is_replaced_whole():
    (made,) = wrong("answer = (\n    7\n)\nassert answer == 7")
    with pytest.raises(AssertionError):
        exec(made)


@pytest.mark.parametrize("cell", ["print(1)", "result = 3", "answer = x", "answer = lambda x: x"])
def test_a_cell_with_no_answer_to_change_is_refused(cell):
    with pytest.raises(ValueError, match="answer"):
        wrong(cell)
