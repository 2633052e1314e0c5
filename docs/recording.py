"""Lessons are run once, and the recording is what both the tests and the site look at.

A lesson is a percent-format script in tutorials/. `record` runs it from top to bottom as a notebook, in a process of
its own, and keeps the notebook with everything it printed and drew. `as_page` turns that notebook into Markdown. The
site's side of this is mkdocs_hooks.py.
"""

import hashlib
import os
from pathlib import Path

import jupytext
import nbformat
import torch
from answers import wrong
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "tutorials").glob("*.py"))
RECORDINGS = ROOT / "build" / "lessons"
MAY_RAISE = {"tags": ["raises-exception"]}  # nbclient's word for a cell that does not end the run

# What a cell printed goes into a fenced block of its own class, so that a page tells output from source. A figure's
# alternative text is its cell's: `# %% alt="rows of each expert"`. The check of an exercise is folded away.
PAGE = """
{%- extends 'markdown/index.md.j2' -%}
{%- macro printed(text, language='text') %}

``` { .{{ language }} .output }
{{ text | strip_ansi | trim('\n') }}
```
{% endmacro -%}
{%- block codecell scoped %}
{%- if 'solution' in cell.metadata.tags %}

??? example "The check of this answer"
{{ super() | indent }}
{%- else %}{{ super() }}{% endif %}
{%- endblock -%}
{%- block stream scoped -%}
{{ printed(output.text, 'diff' if 'diff' in cell.metadata.tags else 'text') }}
{%- endblock -%}
{%- block data_text scoped %}{{ printed(output.data['text/plain']) }}{% endblock -%}
{%- block data_svg %}
![{{ cell.metadata.alt or 'figure' }}]({{ output.metadata.filenames['image/svg+xml'] | path2url }})
{% endblock -%}
"""


def record(lesson: Path, recordings: Path = RECORDINGS) -> Path:
    """The lesson as an executed notebook, `recordings/<lesson's name>.ipynb`.

    Behind the lesson's last cell, and in its process, the check of every exercise is tried on wrong answers: see
    `wrong_answers`.

    A recording is used again while the sources it was made from are the same: the lesson, mega_moe/, reference/, the
    model of the protocol, the recorded results, which a lesson may quote, and how it is recorded.
    Raises nbclient's CellExecutionError, with the traceback, when a cell raises.
    """
    recording = recordings / f"{lesson.stem}.ipynb"
    code = [*ROOT.glob("mega_moe/**/*.py"), *ROOT.glob("mega_moe/**/*.json"), *ROOT.glob("reference/*.py")]
    code += [ROOT / "tests/ranks/model.py", ROOT / "docs/answers.py", ROOT / "docs/recording.py"]
    sources = _digest([lesson, *code, *ROOT.glob("docs/results/*.json")])
    if recording.exists() and nbformat.read(recording, as_version=4).metadata.get("sources") == sources:
        return recording

    notebook = jupytext.read(lesson)
    lesson_cells, wrong_cells = notebook.cells, []
    for cell in lesson_cells:
        if "solution" in cell.metadata.get("tags", []):
            wrong_cells += [nbformat.v4.new_code_cell(source, metadata=MAY_RAISE) for source in wrong(cell.source)]
    notebook.cells = lesson_cells + wrong_cells
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        extra_arguments=["--InlineBackend.figure_formats={'svg'}", "--log-level=ERROR"],
        resources={"metadata": {"path": str(ROOT)}},
    ).execute(env=environment)

    notebook.cells = lesson_cells
    notebook.metadata["wrong_answers"] = [[cell.source.splitlines()[0], _error(cell)] for cell in wrong_cells]
    notebook.metadata["sources"] = sources
    recordings.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, recording)
    return recording


def wrong_answers(recording: Path) -> list[tuple[str, str]]:
    """The wrong answers that the checks of a lesson's exercises were tried on, each with the name of the error that it
    met; an empty one is an answer that was taken for right."""
    return [tuple(tried) for tried in nbformat.read(recording, as_version=4).metadata["wrong_answers"]]


def as_page(recording: Path) -> tuple[str, dict[str, bytes]]:
    """A recording as Markdown, and its figures by the file names that the Markdown uses.

    A cell tagged `hide-input` (`# %% tags=["hide-input"]`) shows only what it printed and drew. What one tagged `diff`
    prints, the difference of two sources, gets the colours of such. One tagged `solution` holds the answer to an
    exercise and its check (answers.py says how): the page folds it, as it would spoil the rest.
    """
    exporter = MarkdownExporter(
        extra_loaders=[DictLoader({"lesson.md.j2": PAGE})],
        template_file="lesson.md.j2",
        config={
            "TagRemovePreprocessor": {
                "enabled": True,
                "remove_input_tags": ["hide-input"],
            }
        },
    )
    resources = {"unique_key": recording.stem, "output_files_dir": f"{recording.stem}_figures"}
    page, resources = exporter.from_filename(str(recording), resources=resources)
    return page, resources["outputs"]


def _error(cell: nbformat.NotebookNode) -> str:
    """The name of the exception that ended a cell; empty if none did."""
    return next((output.ename for output in cell.outputs if output.output_type == "error"), "")


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
