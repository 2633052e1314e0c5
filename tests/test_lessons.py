"""Every lesson runs from top to bottom, as a notebook here and, under -m full, as the plain script that it is."""

import ast
import os
import subprocess
import sys

import pytest
import torch

recording = pytest.importorskip("recording", reason="a lesson is recorded with what the docs extra installs")

pytestmark = pytest.mark.xdist_group("site")  # the site renders what is recorded here: one process, no lesson twice

lessons = pytest.mark.parametrize("lesson", recording.LESSONS, ids=lambda lesson: lesson.stem)


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


def test_a_lesson_that_raises_is_not_recorded(tmp_path):
    lesson = tmp_path / "raises.py"
    lesson.write_text("# %%\nassert 6 * 7 == 54\n")

    with pytest.raises(Exception, match="assert 6 \\* 7 == 54"):
        recording.record(lesson, recordings=tmp_path)
    assert not (tmp_path / "raises.ipynb").exists()
