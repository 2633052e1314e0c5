"""Every page of the site in a real browser, and the stepper used as a reader uses it, with a mouse and with keys.

It is Debian's Chromium, driven by Playwright; nothing is downloaded. Pages are opened from disk, since they shall need
no server; what needs one, the search, is tried where one serves the site, as `make docs` does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("recording", reason="the site is built with what the docs extra installs")
pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser: pip install playwright")

from export_schedules import exported, layers, work_of
from playwright.sync_api import ConsoleMessage, Page

from mega_moe.schedule import ARRIVALS, KIND, KINDS
from mega_moe.simulate import Deadlock, Span, by_ticket, in_words, play

pytestmark = pytest.mark.xdist_group("site")  # one build serves test_site.py too

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
SCHEMES = {"light": "default", "dark": "slate"}
LAYERS = layers()


@dataclass
class Tab:
    """A page of the browser, what it has complained of since it was opened, and the addresses that it has loaded."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.loads.append(request.url))

    def _hear(self, line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            self.complaints.append(line.text)

    def open(self, address: str | Path, viewport: dict = DESKTOP) -> Page:
        self.page.goto("about:blank")  # else another #fragment would not open the page anew
        self.complaints.clear()
        self.loads.clear()
        self.page.set_viewport_size(viewport)
        self.page.goto(f"file://{address}" if isinstance(address, Path) else address)
        return self.page

    def is_alone(self, *places: str) -> bool:
        """Whether it has loaded something, and nothing but from these places."""
        return bool(self.loads) and all(load.startswith(places) for load in self.loads)


@pytest.fixture(scope="module")
def tab(browser) -> Tab:
    """One for all tests: to start another takes a second."""
    return Tab(browser.new_page())


# Every page.

SWITCH = "scheme => document.querySelector(`input[data-md-color-scheme=${scheme}]`).click()"

LOOK = """() => ({
    scheme: document.body.dataset.mdColorScheme,
    over: document.documentElement.scrollWidth - innerWidth,
    formulas: [...document.querySelectorAll("math")].map((formula) => formula.getBoundingClientRect()),
    figures: [...document.images].map((image) => [image.src, image.complete && image.naturalWidth > 0]),
})"""


@pytest.fixture(scope="module")
def visits(site, tab) -> dict[str, dict]:
    """Each page, wide and light, then narrow and dark: what it complains of, what it loads, and what is to be seen."""
    found = {}
    for file in sorted(site.rglob("*.html")):
        if file.name == "404.html":  # a server's, so its links begin at the root
            continue
        page = tab.open(file)
        for viewport, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
            page.set_viewport_size(viewport)
            page.evaluate(SWITCH, SCHEMES[scheme])
            visit = {"complaints": tab.complaints[:], "alone": tab.is_alone("file://"), "wanted": SCHEMES[scheme]}
            name = f"{file.relative_to(site)}, {viewport['width']} wide, {scheme}"
            found[name] = visit | page.evaluate(LOOK)
    return found


def failing(visits: dict[str, dict], wrong: Callable[[dict], object]) -> dict:
    """The pages that have something wrong, and what."""
    found = {name: wrong(visit) for name, visit in visits.items()}
    return {name: what for name, what in found.items() if what}


def test_no_page_complains(visits):
    assert len(visits) > 40
    assert not failing(visits, lambda visit: visit["complaints"])


def test_no_page_loads_anything_from_elsewhere(visits):
    assert not failing(visits, lambda visit: not visit["alone"])


def test_no_page_is_wider_than_the_screen(visits):
    assert not failing(visits, lambda visit: max(visit["over"], 0))


def test_a_reader_may_have_pages_light_or_dark(visits):
    assert not failing(visits, lambda visit: visit["scheme"] != visit["wanted"])


def test_a_served_page_finds_words_and_loads_from_its_server_alone(tab, site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        for name in ("404.html", "index.html"):
            page = tab.open(here + name)
            assert not tab.complaints and tab.is_alone(here, f"blob:{here}")
        page.locator(".md-search__input").fill("deadlock")
        page.locator(".md-search-result__link[href*=glossary]").first.wait_for()
        assert not tab.complaints and tab.is_alone(here, f"blob:{here}")
        tab.page.goto("about:blank")
        server.shutdown()


def test_formulas_are_to_be_seen(visits):
    small = lambda visit: [box for box in visit["formulas"] if box["width"] < 3 or box["height"] < 3]
    assert not failing(visits, small)
    assert sum(len(visit["formulas"]) for name, visit in visits.items() if name.startswith("math.html")) > 100


def test_figures_are_loaded(visits):
    assert not failing(visits, lambda visit: [src for src, loaded in visit["figures"] if not loaded])
    assert all(visit["figures"] for name, visit in visits.items() if name.startswith("lessons/"))


@pytest.mark.parametrize(
    "body, seen",
    [
        ("<script>none()</script>", lambda tab, look: "none is not defined" in str(tab.complaints)),
        ("<img src='none.png'>", lambda tab, look: not look["figures"][0][1] and tab.complaints),
        ("<p style='width: 400px'>wide</p>", lambda tab, look: look["over"] > 0),
        ("<math></math>", lambda tab, look: look["formulas"][0]["width"] == 0),
        ("<img src='http://127.0.0.2:9/x.png'>", lambda tab, look: not tab.is_alone("file://")),
    ],
)
def test_a_fault_of_a_page_is_seen(tab, tmp_path, body, seen):
    (tmp_path / "page.html").write_text(f"<!doctype html><body>{body}")
    page = tab.open(tmp_path / "page.html", PHONE)

    assert seen(tab, page.evaluate(LOOK))


# The stepper.


@pytest.fixture
def stepper(tab, site) -> Iterator[Page]:
    """Its page, from disk, which must not complain, nor load what is not on this disk."""
    yield tab.open(site / "stepper.html")
    assert not tab.complaints and tab.is_alone("file://")


def part(page, name: str):
    return page.locator(f"#stepper [data-part={name}]")


def status(page) -> str:
    return part(page, "status").inner_text()


def choose(page, **choices: str) -> None:
    for name, value in choices.items():
        part(page, name).select_option(value)


PLAY_ALL = """() => SCHEDULES.layers.flatMap((layer, l) => Object.entries(layer.cases).flatMap(([direction, cases]) =>
    cases.flatMap((one, c) => Object.entries(one.orders).flatMap(([order, numbers], o) =>
        (o ? [["kept", 2]] : [["kept", 1], ["kept", 3], ["all", 2], ["combine", 4], ["down", 2], ["dx", 3]]).map(
            ([waits, programs]) => {
                const run = replay(one, numbers, programs, brokenBy(one, waits));
                const poisoned = [...judge(one, run.spans).poisoned];
                return { layer: l, direction, case: c, order, waits, programs, ...run, poisoned };
            })))))"""


def poison(reads: list[list[int]], spans: list[Span]) -> list[int]:
    """The tiles that read what is not stored when they begin, or what such a tile has stored."""
    ends, poisoned = {span.tile: span.end for span in spans}, []
    for span in sorted(spans, key=lambda span: span.start):
        if any(other in poisoned or ends[other] > span.start for other in reads[span.tile]):
            poisoned.append(span.tile)
    return sorted(poisoned)


def test_the_browser_plays_schedules_as_simulate_does(stepper):
    """Every schedule of the page, in each order, and some without waits: the same spans, the same deadlocks, and NaN in
    the same tiles; never any where all waits are kept."""
    outcomes, everything = set(), exported()["layers"]
    runs = stepper.evaluate(PLAY_ALL)
    for run in runs:
        layer, W = LAYERS[run["layer"]], everything[run["layer"]]["cases"][run["direction"]][run["case"]]["ranks"]
        one = everything[run["layer"]]["cases"][run["direction"]][run["case"]]
        order, work = one["orders"][run["order"]], work_of(layer, run["direction"], W, one["tile"])
        home_of_token = [rank for rank, tokens in enumerate(one["tokens_of_rank"]) for _ in range(tokens)]
        table = [list(one["tiles"][n]) for n in order]
        for tile in table:
            if run["waits"] in ("all", KINDS[tile[KIND]]):
                tile[ARRIVALS] = 0
        homes = [home_of_token[token] for token in one["token_of_row"]]
        lengths = [one["length"][n] for n in order]
        try:
            spans = play(table, work, layer.E, W, homes, by_ticket(table, W, run["programs"]), lengths)
        except Deadlock as deadlock:
            stuck = sorted((held["program"], one["tiles"][held["tile"]]) for held in run["stuck"])
            assert str(deadlock) == "; ".join(
                f"program {program} waits with {in_words(tile)}" for program, tile in stuck
            )
            outcomes.add("deadlock")
            continue
        spans = [replace(span, tile=order[span.tile]) for span in spans]
        assert [Span(**span) for span in run["spans"]] == spans and not run["stuck"]
        assert sorted(run["poisoned"]) == poison(one["reads"], spans)
        assert not run["poisoned"] or run["waits"] != "kept"
        outcomes.add("wrong" if run["poisoned"] else "right")
    assert len(runs) > 400 and outcomes == {"right", "wrong", "deadlock"}


def test_a_reader_clicks_from_event_to_event(stepper):
    assert status(stepper) == "10 tiles, 6 of which wait for others. Nothing is drawn yet."

    part(stepper, "on").click()
    first = "Program 0 draws ticket 0: gate_up of expert 0, rows 0–1. It waits for nothing and begins."
    assert status(stepper) == first
    part(stepper, "on").click()
    assert status(stepper).startswith("Program 1 draws ticket 1")
    part(stepper, "back").click()
    assert status(stepper) == first

    part(stepper, "slider").fill("14")
    assert status(stepper).endswith("down of expert 2, rows 5–6. It waits (gate_up of expert 2: 0 of 1).")
    assert stepper.locator(".tile[data-state=waits]").all_inner_texts() == ["7\ndown\nexpert 2\nwaits 0/1"]
    assert stepper.locator(".tile.awaited").all_inner_texts() == ["5\ngate_up\nexpert 2\nworks"]
    assert stepper.locator(".bar.waits:visible").count() == 1

    part(stepper, "last").click()
    assert status(stepper).startswith("All tiles are done at time 15. Programs worked 86.7 % of it and waited 13.3 %.")
    part(stepper, "first").click()
    assert status(stepper).startswith("10 tiles")


def test_a_wait_that_is_taken_away_and_given_back(stepper):
    """Of down of expert 2, whose rows are of tokens 0 and 3: as lesson 6 finds with two programs."""
    stepper.locator(".tile", has_text="down").nth(3).click()
    part(stepper, "toggle").click()
    assert stepper.locator(".tile.broken").count() == 1
    part(stepper, "slider").fill("14")
    assert status(stepper).endswith("so it begins. A wrong read: ticket 5 has not stored act yet.")
    assert stepper.locator(".piece.early").count() == 2

    part(stepper, "last").click()
    assert status(stepper).endswith("Wrong: y of tokens 0 and 3 is NaN.")
    poisoned = stepper.locator(".piece.poisoned").evaluate_all(
        "cells => cells.map((cell) => Number(cell.dataset.cell))"
    )
    assert poisoned == [0 * 2 + 1, 3 * 2 + 0, 0, 3]  # slots of token 0 and token 3, then y

    choose(stepper, programs="4")
    assert stepper.locator(".tile.broken").count() == 1
    choose(stepper, programs="2", tile="4 rows")  # other tiles
    assert stepper.locator(".tile.broken").count() == 0
    choose(stepper, tile="2 rows")
    stepper.locator(".tile", has_text="down").nth(3).click()
    part(stepper, "toggle").click()

    stepper.locator(".tile", has_text="down").nth(3).click()
    part(stepper, "toggle").click()
    part(stepper, "last").click()
    assert status(stepper).endswith("All results are right.") and stepper.locator(".poisoned").count() == 0


def test_choices_change_what_is_played(stepper):
    choose(stepper, order="expert by expert")
    part(stepper, "last").click()
    assert status(stepper).startswith("All tiles are done at time 17.")

    choose(stepper, order="wrong: from last to first")
    part(stepper, "last").click()
    assert status(stepper).startswith(
        "Deadlock: nobody works. Program 0 with ticket 0 and program 1 with ticket 1 wait"
    )
    assert stepper.locator(".tile[data-state=waits]").count() == 2 and not stepper.locator(".bar.works:visible").count()

    order = "lagged groups, phases mixed"
    choose(
        stepper, layer="1", direction="backward", ranks="2", tile="4 rows", programs="4", order=order, waits="combine"
    )
    assert stepper.locator(".lane").count() == 8
    assert stepper.locator(".tile.broken").count() == stepper.locator(".tile.combine").count() == 4
    assert part(stepper, "table").locator("tbody tr").count() == stepper.locator(".tile").count()

    words = stepper.url.split("#")[1]
    stepper.goto("about:blank")
    stepper.go_back()
    assert stepper.url.endswith(words) and part(stepper, "layer").input_value() == "1"
    assert part(stepper, "waits").input_value() == "combine"


def test_a_reader_without_a_mouse(stepper):
    """Everything by keys, and the focus is to be seen, and stays where it is."""
    press = stepper.keyboard.press
    focused = lambda: stepper.evaluate("document.activeElement.getAttribute('aria-label')")
    part(stepper, "waits").focus()
    press("Tab")
    assert focused() == "To the beginning"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert stepper.evaluate(outline) == "solid"

    press("ArrowRight")
    press("ArrowRight")
    press("ArrowLeft")
    assert status(stepper).startswith("Program 0 draws ticket 0")
    press("End")
    assert status(stepper).startswith("All tiles are done")
    press("Home")
    assert status(stepper).startswith("10 tiles") and focused() == "To the beginning"

    for _ in range(6):
        press("Tab")
    assert focused().startswith("ticket 0, gate_up of expert 0")  # all tiles are one stop
    for _ in range(7):
        press("ArrowDown")
    press("ArrowDown")
    press("ArrowUp")
    assert focused() == "ticket 7, down of expert 2, rows 5–6: not drawn" and stepper.evaluate(outline) == "solid"
    press("Tab")
    press("Enter")
    press("End")
    assert status(stepper).endswith("Wrong: y of tokens 0 and 3 is NaN.")


def test_it_plays_by_itself_and_stops_at_the_end(browser, site):
    page = browser.new_page()  # whose clock stands still
    page.clock.install()
    page.goto(f"file://{site}/stepper.html#at=20")
    part(page, "play").click()
    assert part(page, "play").inner_text() == "Pause"
    page.clock.run_for(1700)
    assert part(page, "where").inner_text() == "event 22 of 23 · time 15"
    page.clock.run_for(10_000)
    assert status(page).startswith("All tiles are done") and part(page, "play").inner_text() == "Play"
    page.close()


def test_those_who_do_not_see_the_picture_get_it_in_words(stepper):
    assert part(stepper, "status").get_attribute("aria-live") == "polite"
    part(stepper, "slider").fill("14")
    assert part(stepper, "slider").get_attribute("aria-valuetext") == "event 14 of 23, time 10"
    for summary in stepper.locator("#stepper summary").all():
        summary.click()
    lines = part(stepper, "log").locator("li:visible").all_inner_texts()
    assert len(lines) == 14 and lines[-1] == f"Time 10. {status(stepper)}"
    rows = [row.split("\t") for row in part(stepper, "table").inner_text().splitlines()]
    assert rows[0][:2] == ["ticket", "kind"] and rows[0][-6:] == [
        "waits for",
        "state",
        "program",
        "drawn",
        "begins",
        "ends",
    ]
    assert rows[8][-6:] == ["gate_up of expert 2", "waits 0/1", "program 1", "10", "", ""]


SHOWN = {
    "in lagged groups": "All tiles are done at time 15.",
    "Expert by expert": "All tiles are done at time 17.",
    "groups of one expert": "All tiles are done at time 24.",
    "groups of two": "All tiles are done at time 20.",
    "Without the waits of down": "Program 1 draws ticket 7: down of expert 2, rows 5–6. Its wait is taken away",
    "One program": "All tiles are done at time 26. Programs worked 100.0 % of it and waited 0.0 %.",
    "without the waits of combine": "All tiles are done at time 26.",
    "one combine tile to place 3": "Deadlock: nobody works. Program 0 with ticket 3 waits",
    "With two programs": "All tiles are done at time 21.",
    "From last to first": "Deadlock: nobody works. Program 0 with ticket 0, program 1 with ticket 1, program 2",
    "six": "All tiles are done at time 19.",
    "on three ranks": "Program 1 of rank 2 draws ticket 1 of rank 2: gate_up of expert 2, rows 5–6. It waits (dispatch",
}
"""What the text's buttons show, and the text says."""


def test_the_text_shows_what_it_says(stepper):
    buttons = stepper.locator("button[data-show]").all()
    assert [" ".join(button.inner_text().split()) for button in buttons] == list(SHOWN)
    for button, sentence in zip(buttons, SHOWN.values(), strict=True):
        button.click()
        assert status(stepper).startswith(sentence), button.inner_text()
        assert "Wrong" not in status(stepper)


def test_the_largest_schedule_fits_a_phone_in_the_dark(browser, site):
    """Where the reader's system is dark, pages are. Both schemes have the same sizes."""
    page = browser.new_page(viewport=PHONE, color_scheme="dark")
    page.goto(f"file://{site}/stepper.html#layer=2&direction=backward&ranks=2&tile=2+rows,+narrow&programs=8&at=200")
    look = page.evaluate(LOOK)

    assert look["scheme"] == "slate" and look["over"] <= 0
    assert page.locator(".tile").count() > 100
    wide = "parts => parts.filter((part) => part.scrollWidth > part.clientWidth + 2).map((part) => part.textContent)"
    assert page.locator("#stepper :is(button, select, p, li)").evaluate_all(wide) == []
    page.close()
