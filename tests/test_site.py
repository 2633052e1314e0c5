"""The site builds without a warning, and every page is whole as it lies on disk: nothing is loaded from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

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


class Links(HTMLParser):
    """Collects where a page's links lead, and the places in it that a link may lead to."""

    def __init__(self):
        super().__init__()
        self.links, self.places = [], {""}

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.places |= {attributes.get("id"), attributes.get("name")}
        if tag == "a" and attributes.get("href") and not urlsplit(attributes["href"]).scheme:
            self.links.append(attributes["href"])


def broken_links(site: Path) -> list[str]:
    """The links of all pages, from one to another or within it, that lead nowhere."""
    pages = {}
    for page in site.rglob("*.html"):
        pages[page] = Links()
        pages[page].feed(page.read_text())
    broken = []
    for page, links in pages.items():
        for link in links.links:
            path, place = map(unquote, urldefrag(link))
            # The page for what is not found may be shown anywhere, so its links begin at the root.
            target = (
                (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve() if path else page
            )
            target = target / "index.html" if target.is_dir() else target
            if not (place in pages[target].places if target in pages else target.exists() and not place):
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


def test_nothing_is_loaded_from_elsewhere(site):
    for page in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not loads_from_elsewhere(page), page.relative_to(site)


def test_no_script_is_asked_to_draw(site):
    """The theme would fetch Mermaid, and formulas would wait for MathJax: figures are SVG and formulas MathML."""
    for page in site.rglob("*.html"):
        assert not re.search(r'class="(mermaid|arithmatex)"', page.read_text()), page.relative_to(site)


def test_every_link_within_the_site_leads_somewhere(site):
    assert not broken_links(site)


@pytest.mark.parametrize("link", ["none.html", "page.html#none", "#none", "folder/"])
def test_a_link_that_leads_nowhere_is_seen(tmp_path, link):
    (tmp_path / "folder").mkdir()
    for good in ("#here", "page.html#here", "page.html", "https://example.org/none.html"):
        (tmp_path / "page.html").write_text(f'<h2 id="here"></h2><a href="{good}">there</a>')
        assert not broken_links(tmp_path)

    (tmp_path / "page.html").write_text(f'<h2 id="here"></h2><a href="{link}">there</a>')
    assert broken_links(tmp_path) == [f"page.html: {link}"]


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
