"""Every lesson runs from top to bottom, as a notebook here and, under -m full, as the plain script that it is."""

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from mega_moe import LADDER

recording = pytest.importorskip("recording", reason="a lesson is recorded with what the docs extra installs")

pytestmark = pytest.mark.xdist_group("site")  # the site renders what is recorded here: one process, no lesson twice

lessons = pytest.mark.parametrize("lesson", recording.LESSONS, ids=lambda lesson: lesson.stem)
exercising = pytest.mark.parametrize(
    "lesson", [path for path in recording.LESSONS if path.stem != "course"], ids=lambda lesson: lesson.stem
)
each_rung = pytest.mark.parametrize("taught", LADDER, ids=lambda rung: rung.name)


def source_of(rung):
    """A rung's lesson, which has its stage file's name."""
    return (recording.ROOT / "tutorials" / f"{rung.module}.py").read_text()


def title_of(rung):
    return re.search(r"^# # (.*)$", source_of(rung), re.MULTILINE)[1]


@lessons
def test_a_lesson_runs_and_draws_a_figure(lesson):
    page, figures = recording.as_page(recording.record(lesson))

    assert "{ .text .output }" in page
    assert any(name.endswith(".svg") and name in page for name in figures)


@lessons
def test_a_lesson_asks_nothing_of_a_notebook(lesson):
    """What IPython adds to Python would keep it from running as a plain script."""
    names = {node.id for node in ast.walk(ast.parse(lesson.read_text())) if isinstance(node, ast.Name)}

    assert not names & {"display", "get_ipython"}


@each_rung
def test_a_lesson_has_the_parts_of_the_course(taught):
    """What the course page promises of every lesson: the rung below in numbers, the same example, a real kernel, a diff
    of two recipes, parity, the record's times, the flag."""
    source, lowest = source_of(taught), taught is LADDER[0]
    headings = re.findall(r"^# ## (.*)$", source, re.MULTILINE)
    parts = ["Why this wastes a GPU"] if lowest else ["What the rung below costs", "Is it right", "Is it fast"]
    parts += ["The flag", "Exercises"]

    assert [part for heading in headings for part in parts if heading.startswith(part)] == parts
    assert "course_example(" in source and "recorded.newest()" in source
    assert ("reference/" if lowest else "mega_moe/kernels/") in "".join(re.findall('^# --8<-- "(.*)"$', source, re.M))
    assert lowest or "difflib.unified_diff(" in source
    assert f'stage="{taught.name}"' in source


def test_lessons_lead_from_one_to_the_next():
    """At its head each names its neighbours by their titles, and its flag; the course's own page leads to the first."""
    heads = [source_of(rung).partition("# You will learn")[0].replace("\n# ", " ") for rung in LADDER]
    links = [f"[{title_of(rung).partition(':')[0]}]({rung.module}.md)" for rung in LADDER]
    for (head, link), (next_head, next_link) in pairwise(zip(heads, links)):
        assert f"ext: {next_link}" in head and f"*Before: {link}" in next_head
    assert all(f'the flag: `stage="{rung.name}"' in head for rung, head in zip(LADDER, heads))
    assert f"*Next: {links[0]}" in (recording.ROOT / "tutorials" / "course.py").read_text()


@each_rung
def test_two_exercises_or_more_each_with_an_answer_and_its_check(taught):
    exercises = source_of(taught).partition("# ## Exercises\n")[2]
    marks = r'^# \*\*(\d)\.\*\* |^# (\?\?\? success) "Answer"$|^# %% tags=\["(solution)"\]$'
    found = ["".join(part) for part in re.findall(marks, exercises, re.MULTILINE)]

    assert len(found) >= 6
    assert found == [part for n in range(len(found) // 3) for part in (str(n + 1), "??? success", "solution")]


@each_rung
def test_the_text_of_an_answer_says_what_its_check_asserts(taught):
    """Each number of `answer` stands in the text above it, 0.36 as 36 % perhaps."""
    exercise = r'^# \?\?\? success "Answer"$(.*?)^# %% tags=\["solution"\]\nanswer = (.*?)\n\n'
    answers = re.findall(exercise, source_of(taught), re.MULTILINE | re.DOTALL)
    assert len(answers) >= 2
    for text, answer in answers:
        said = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d)", "", text))}
        literals = [node.value for node in ast.walk(ast.parse(answer)) if isinstance(node, ast.Constant)]
        numbers = [value for value in literals if type(value) in (int, float)]
        assert all(number in said or round(100 * number) in said for number in numbers), answer


@exercising
def test_a_wrong_answer_is_refused(lesson):
    """Each number of each answer, put wrong, makes the exercise's own check raise, and say what is off."""
    tried = recording.wrong_answers(recording.record(lesson))

    assert len(tried) >= 2
    assert [answer for answer, error in tried if error != "NotYet"] == []


@exercising
def test_an_exercise_says_where_to_look_again(lesson):
    """Under a heading that the lesson has, for each part of the answer."""
    source = lesson.read_text()
    headings = re.findall(r"^# ## (.*)$", source, re.MULTILINE)
    cells = [cell for cell in source.split("\n# %%") if cell.startswith(' tags=["solution"]')]
    assert len(cells) >= 2
    for cell in cells:
        hints = re.findall(r'\(\s*"([^"]+)",\s*"', cell.partition("see=")[2].partition("\n)\n")[0])
        assert hints and set(hints) <= set(headings), hints


@pytest.mark.full
@lessons
def test_a_lesson_runs_as_a_plain_script(lesson):
    environment = os.environ | {"MPLBACKEND": "agg"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = str(recording.ROOT)  # a bare checkout has nothing installed
    subprocess.run([sys.executable, lesson], cwd=recording.ROOT, env=environment, check=True)


def test_a_recording_serves_until_its_sources_change(tmp_path):
    lesson = tmp_path / "counts.py"
    lesson.write_text("# %%\nprint(6 * 7)\n")
    kept = recording.record(lesson, recordings=tmp_path)
    made = kept.stat().st_mtime_ns

    assert recording.record(lesson, recordings=tmp_path).stat().st_mtime_ns == made

    lesson.write_text("# %%\nprint(6 * 8)\n")
    assert "48" in recording.as_page(recording.record(lesson, recordings=tmp_path))[0]


def test_a_check_is_folded_on_the_page_and_says_which_wrong_answers_it_takes(tmp_path):
    lesson = tmp_path / "exercise.py"
    lesson.write_text('# %% tags=["solution"]\nanswer = dict(a=6, b=7)\nprint("checked")\nassert answer["a"] == 6\n')
    recorded = recording.record(lesson, recordings=tmp_path)
    page, _ = recording.as_page(recorded)

    assert dict(recording.wrong_answers(recorded)) == {
        "answer = dict(a=7, b=7)": "AssertionError",
        "answer = dict(a=6, b=8)": "",  # nothing looks at b
    }
    folded = page.partition('??? example "The check of this answer"\n')[2]
    assert "    answer = dict(a=6, b=7)" in folded and "    checked" in folded
    assert not [line for line in folded.splitlines() if line and not line.startswith("    ")]
    assert "b=8" not in page


def test_a_lesson_that_raises_is_not_recorded(tmp_path):
    lesson = tmp_path / "raises.py"
    lesson.write_text("# %%\nassert 6 * 7 == 54\n")

    with pytest.raises(Exception, match="assert 6 \\* 7 == 54"):
        recording.record(lesson, recordings=tmp_path)
    assert not (tmp_path / "raises.ipynb").exists()
