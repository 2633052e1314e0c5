"""What MkDocs calls while it builds the site: lessons become pages, formulas become MathML, and the pages that draw get
their data.

All of it happens at build time, so that a page is complete as it lies on disk: no script from elsewhere, no network.
"""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory

import export_schedules
import roofline_data
from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from recording import LESSONS, as_page, record

_MATHML = LatexToMathML(fancy_error=False)
_LESSON = re.compile(r"\]\(((?:\.\./)*)\.\./tutorials/(\w+)\.py(#[\w-]+)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files, config):
    """Add a page lessons/<name>.md for each lesson, its figures beside it, and the data of the pages that draw."""
    for lesson in LESSONS:
        page, figures = as_page(record(lesson))
        files.append(File.generated(config, f"lessons/{lesson.stem}.md", content=page))
        for name, figure in figures.items():
            files.append(File.generated(config, f"lessons/{name}", content=figure))
    files.append(File.generated(config, "js/schedules.js", content=export_schedules.as_script()))
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, Path(__file__).with_name("timeline_data.py"), folder], check=True)
        for path in Path(folder).iterdir():
            files.append(File.generated(config, f"js/{path.name}", content=path.read_text()))
    files.append(File.generated(config, "js/roofline_data.js", content=roofline_data.as_script()))
    return files


def on_page_markdown(markdown, **_):
    """Where a page links to the source of a lesson, which is what there is on GitHub, the site has the lesson."""
    return _LESSON.sub(r"](\1lessons/\2.md\3)", markdown)


def on_page_content(html, page, **_):
    """Turn each formula that the arithmatex extension marked into MathML, which browsers render by themselves."""

    def mathml(formula: re.Match) -> str:
        display, latex = formula[1] == "div", unescape(formula[2])
        try:
            return _MATHML.convert_with_local_state(latex, displaystyle=display)
        except LatexError as error:
            raise PluginError(f"{page.file.src_uri}: {latex.strip()}\n{error}") from error

    return _FORMULA.sub(mathml, html)
