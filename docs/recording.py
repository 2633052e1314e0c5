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
from jinja2 import DictLoader
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "tutorials").glob("*.py"))
RECORDINGS = ROOT / "build" / "lessons"

# What a cell printed goes into a fenced block of its own class, so that a page tells output from source. A figure's
# alternative text is its cell's: `# %% alt="rows of each expert"`.
PAGE = """
{%- extends 'markdown/index.md.j2' -%}
{%- macro printed(text) %}

``` { .text .output }
{{ text | strip_ansi | trim('\n') }}
```
{% endmacro -%}
{%- block stream %}{{ printed(output.text) }}{% endblock -%}
{%- block data_text scoped %}{{ printed(output.data['text/plain']) }}{% endblock -%}
{%- block data_svg %}
![{{ cell.metadata.alt or 'figure' }}]({{ output.metadata.filenames['image/svg+xml'] | path2url }})
{% endblock -%}
"""


def record(lesson: Path, recordings: Path = RECORDINGS) -> Path:
    """The lesson as an executed notebook, `recordings/<lesson's name>.ipynb`.

    A recording is used again while the sources it was made from are the same: the lesson,
    mega_moe/, reference/, the model of the protocol and the recorded results, which a lesson may quote.
    Raises nbclient's CellExecutionError, with the traceback, when a cell raises.
    """
    recording = recordings / f"{lesson.stem}.ipynb"
    code = [*ROOT.glob("mega_moe/**/*.py"), *ROOT.glob("mega_moe/**/*.json"), *ROOT.glob("reference/*.py")]
    code.append(ROOT / "tests/ranks/model.py")
    sources = _digest([lesson, *code, *ROOT.glob("docs/results/*.json")])
    if recording.exists() and nbformat.read(recording, as_version=4).metadata.get("sources") == sources:
        return recording

    notebook = jupytext.read(lesson)
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

    notebook.metadata["sources"] = sources
    recordings.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, recording)
    return recording


def as_page(recording: Path) -> tuple[str, dict[str, bytes]]:
    """A recording as Markdown, and its figures by the file names that the Markdown uses.

    A cell tagged `hide-input` (`# %% tags=["hide-input"]`) shows only what it printed and drew. One tagged `solution`
    checks the answer to an exercise: it runs as all others do, but the page, which it would spoil, leaves it out.
    """
    exporter = MarkdownExporter(
        extra_loaders=[DictLoader({"lesson.md.j2": PAGE})],
        template_file="lesson.md.j2",
        config={
            "TagRemovePreprocessor": {
                "enabled": True,
                "remove_input_tags": ["hide-input"],
                "remove_cell_tags": ["solution"],
            }
        },
    )
    resources = {"unique_key": recording.stem, "output_files_dir": f"{recording.stem}_figures"}
    page, resources = exporter.from_filename(str(recording), resources=resources)
    return page, resources["outputs"]


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
