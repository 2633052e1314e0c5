"""The site builds without a warning, and every page is whole as it lies on disk: nothing is loaded from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

recording = pytest.importorskip("recording", reason="the site is built with what the docs extra installs")

pytestmark = pytest.mark.xdist_group("site")  # after the lessons, in their process

ELSEWHERE = re.compile(r"(https?:)?//")
STYLE_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Loads(HTMLParser):
    """Collects what a browser would fetch from another host while it shows a page; links to follow do not count."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        loads = [attributes.get("src"), attributes.get("poster"), attributes.get("data"), attributes.get("srcset")]
        if tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            loads.append(attributes.get("href"))
        if tag in ("image", "use"):
            loads.append(attributes.get("href") or attributes.get("xlink:href"))
        self.found += [load for load in loads if load and ELSEWHERE.match(load)]
        self.found += STYLE_LOADS.findall(attributes.get("style") or "")

    def handle_data(self, text):
        if self.cdata_elem == "style":
            self.found += STYLE_LOADS.findall(text)


def loads_from_elsewhere(page: Path) -> list[str]:
    """What the page or style sheet fetches from another host."""
    text = page.read_text()
    if page.suffix == ".css":
        return STYLE_LOADS.findall(text)
    loads = Loads()
    loads.feed(text)
    return loads.found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=recording.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert build.returncode == 0, build.stdout
    return folder


def test_nothing_is_loaded_from_elsewhere(site):
    for page in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not loads_from_elsewhere(page), page.relative_to(site)


def test_no_script_is_asked_to_draw(site):
    """The theme would fetch Mermaid, and formulas would wait for MathJax: figures are SVG and formulas MathML."""
    for page in site.rglob("*.html"):
        assert not re.search(r'class="(mermaid|arithmatex)"', page.read_text()), page.relative_to(site)


@pytest.mark.parametrize("lesson", recording.LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_is_a_page_with_output_figure_and_source(site, lesson):
    page = (site / "lessons" / f"{lesson.stem}.html").read_text()
    figures = re.findall(r'<img [^>]*src="([^"]+\.svg)"', page)

    assert 'class="output highlight"' in page
    assert figures and all((site / "lessons" / figure).exists() for figure in figures)
    assert "--8&lt;--" not in page and "--8<--" not in page


@pytest.mark.parametrize(
    "name, text",
    [
        ("page.html", '<script src="https://example.org/math.js"></script>'),
        ("page.html", '<script src="//example.org/math.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="https://example.org/fonts.css">'),
        ("page.html", '<img src="https://example.org/badge.svg">'),
        ("page.html", '<p style="background: url(https://example.org/paper.png)">'),
        ("page.html", "<style>@import 'https://example.org/fonts.css';</style>"),
        ("style.css", "@font-face { src: url('https://example.org/font.woff2'); }"),
    ],
)
def test_a_load_from_elsewhere_is_seen(tmp_path, name, text):
    page = tmp_path / name
    page.write_text(text)

    assert loads_from_elsewhere(page)


def test_a_link_to_elsewhere_is_no_load(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<a href="https://example.org">there</a> <link rel="canonical" href="https://example.org">')

    assert not loads_from_elsewhere(page)
