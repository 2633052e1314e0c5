"""The pages that draw, in a real browser: the timeline viewer, which also opens traces, and the roofline explorer,
whose formulas are mega_moe/roofline.py's once more."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("mkdocs", reason="the site is built with what the docs extra installs")
pytest.importorskip("triton", reason="tile times stand beside the kernels")

from cases import DEVICE

from mega_moe import predict, roofline
from mega_moe.ladder import DTYPES, Layer
from mega_moe.roofline import BILLED, CEILINGS, DIRECTIONS
from mega_moe.samples import random_inputs
from mega_moe.schedule import KINDS, schedule
from mega_moe.shapes import PRESETS, Problem
from mega_moe.symmetric import LocalHeaps
from mega_moe.timeline import COLOURS
from mega_moe.trace import Span, Trace, trace

pytestmark = pytest.mark.xdist_group("site")  # in the process that builds it

ROOT = Path(__file__).resolve().parents[1]
EXACT = 2**53  # up to here a double holds every whole number

both_directions = pytest.mark.parametrize("direction", DIRECTIONS)


@pytest.fixture
def open_page(browser, site):
    """Opens a page of the site as it lies on disk; in the end no page may have complained, or asked for anything that
    does not lie there too."""
    complaints, contexts = [], []

    def open_page(name: str, wide: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": wide, "height": 1400}, color_scheme=scheme)
        context.set_default_timeout(5000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def timeline(open_page):
    return open_page("timeline")


@pytest.fixture
def explorer(open_page):
    return open_page("roofline")


def part(page, name: str):
    """A part of the viewer, by the name that its script knows it by."""
    return page.locator(f"[data-viewer={name}]")


def field(page, name: str):
    """The same of the explorer."""
    return page.locator(f"[data-roofline={name}]")


def rows_of(table) -> dict[str, list[str]]:
    """The lines of a table by their first cell."""
    lines = table.evaluate("table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))")
    return {name: cells for name, *cells in lines}


# Examples.


@pytest.fixture(scope="module")
def examples(site) -> dict:
    """What the page was given."""
    text = (site / "js/timeline_data.js").read_text()
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def test_examples_last_as_long_as_they_are_predicted_to(examples):
    p = PRESETS["qwen3-30b-a3b"].at(device="cpu")
    pairs = {pair["title"]: pair["timelines"] for pair in examples["pairs"]}
    over = [predict.over_links(p.at(save="inputs"), 8, "forward", rung) for rung in ("ranks", "mega")]
    on = [predict.on_one_gpu(p, "backward", rung, routing="random") for rung in ("persistent", "mega")]
    for title, predictions in (("8 GPUs, forward", over), ("one GPU, backward", on)):
        for packed, prediction in zip(pairs[f"qwen3-30b-a3b on {title}"][:2], predictions, strict=True):
            assert packed["made"] == "predicted" and packed["unit"] == "µs"
            assert packed["summary"]["total"] == pytest.approx(1e3 * prediction.ms)
            first = packed["launches"][0]
            assert first[1] == 0 and 0 < first[2] < 100  # what is not drawn is little


def test_behind_mega_on_one_gpu_stands_what_a_gpu_did(examples):
    of = {pair["title"]: pair["timelines"] for pair in examples["pairs"]}
    for direction in DIRECTIONS:
        _, foretold, traced = of[f"qwen3-30b-a3b on one GPU, {direction}"]
        assert traced["made"].startswith("traced on NVIDIA H200") and traced["unit"] == foretold["unit"]
        assert len(traced["lanes"]) == len(foretold["lanes"])
        counts = [{kind: of["tiles"] for kind, of in drawn["summary"]["kinds"].items()} for drawn in (traced, foretold)]
        assert counts[0].keys() == counts[1].keys()
        for kind, tiles in counts[0].items():
            assert tiles == pytest.approx(counts[1][kind], rel=0.01)  # another sample of random routing
        assert traced["summary"]["total"] == pytest.approx(foretold["summary"]["total"], rel=0.2)


@pytest.fixture(scope="module")
def table() -> list[list[int]]:
    """The schedule of forward on one GPU, which the third pair shows."""
    p = PRESETS["qwen3-30b-a3b"].at(device="cpu")
    share = predict.all_of_it(p.T, p.E, p.K, 1, "random", 0)
    work = predict.forward_work(p, predict.tiles_for(p)[0])
    return schedule(torch.tensor(share.row_start), (p.T,), (p.R,), work).tolist()


def test_the_tiles_of_rung_mega_are_those_of_the_schedule(examples, table):
    lanes = examples["pairs"][2]["timelines"][1]["lanes"]
    drawn = [columns for lane in lanes for columns in lane]
    assert len(drawn) > len(table) / 8 and len(lanes) == 22
    for *columns, ticket, between, waited, worked, moved in drawn:
        assert columns == table[ticket] and min(between, waited) >= 0 and worked > 0 and moved == 0


def test_launches_apart_have_tiles_of_the_same_blocks(examples, table):
    """Of persistent forward: gate_up's tiles and down's strips, and a bar of combine a program."""
    lanes = examples["pairs"][2]["timelines"][0]["lanes"]
    kinds = [[KINDS[columns[0]] for columns in lane] for lane in lanes]
    assert all(of == sorted(of, key=KINDS.index) and of.count("combine") == 1 for of in kinds)
    tiles = [tuple(columns[:7]) for lane in lanes for columns in lane if KINDS[columns[0]] != "combine"]
    blocks = {tuple(columns[1:6]) for columns in table if KINDS[columns[0]] != "combine"}
    assert len(set(tiles)) == len(tiles) and {columns[1:6] for columns in tiles} <= blocks


# The viewer.


def test_the_picture_has_the_steps_in_their_colours(timeline):
    """And shows a launch a step above, and one launch below."""
    assert part(timeline, "above").evaluate("s => s.selectedOptions[0].text").startswith("ranks on 8 GPUs, forward")
    assert part(timeline, "below").evaluate("s => s.selectedOptions[0].text").startswith("mega on 8 GPUs, forward")
    assert part(timeline, "made").inner_text() == "predicted, 22 of 132 programs drawn."
    for step in ("dispatch", "gate_up", "down", "combine"):
        assert pixels(timeline, COLOURS[step]) > 1000, step
    assert pixels(timeline, COLOURS["swiglu"]) == 0  # forward has none of its own
    assert [entry.strip() for entry in part(timeline, "legend").locator("span").all_inner_texts()][:5] == list(COLOURS)


def pixels(page, colour: str) -> int:
    """How many of the picture's have exactly this colour, once it has been drawn."""
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return page.evaluate(
        """([red, green, blue]) => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
            const canvas = document.querySelector("canvas"), copy = document.createElement("canvas");
            const { width, height } = Object.assign(copy, { width: canvas.width, height: canvas.height });
            const pen = copy.getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, 0, 0);
            const { data } = pen.getImageData(0, 0, width, height);
            let found = 0;
            for (let n = 0; n < data.length; n += 4) {
                found += data[n] === red && data[n + 1] === green && data[n + 2] === blue;
            }
            done(found);
        })))""",
        [red, green, blue],
    )


def seen(page) -> tuple[float, float]:
    """From when until when, by the line below the picture."""
    words = part(page, "seen").inner_text()
    if words == "All of it is seen.":
        return 0.0, float("inf")
    begin, end = re.match(r"Seen: ([\d,.]+) to ([\d,.]+) ", words).groups()
    return float(begin.replace(",", "")), float(end.replace(",", ""))


def test_buttons_zoom_and_pan(timeline):
    total = 5647.0
    part(timeline, "in").click()
    part(timeline, "in").click()
    begin, end = seen(timeline)
    assert end - begin == pytest.approx(total / 4, abs=1) and (begin + end) / 2 == pytest.approx(total / 2, abs=1)
    part(timeline, "right").click()
    assert seen(timeline) == (pytest.approx(begin + total / 16, abs=1), pytest.approx(end + total / 16, abs=1))
    part(timeline, "left").click()
    part(timeline, "out").click()
    assert seen(timeline)[1] - seen(timeline)[0] == pytest.approx(total / 2, abs=1)
    part(timeline, "all").click()
    assert seen(timeline) == (0, float("inf"))
    part(timeline, "left").click()  # not beyond the beginning
    assert seen(timeline) == (0, float("inf"))


def test_wheel_and_drag_zoom_and_pan_and_the_page_scrolls_as_before(timeline):
    canvas = part(timeline, "canvas")
    canvas.hover(position={"x": 500, "y": 120})
    timeline.mouse.wheel(0, 100)
    timeline.wait_for_function("scrollY > 50")
    assert seen(timeline) == (0, float("inf"))

    timeline.evaluate("scrollTo(0, 0)")
    canvas.click(position={"x": 500, "y": 120})
    timeline.mouse.wheel(0, -300)
    begin, end = seen(timeline)
    assert end - begin < 0.6 * 5647 and timeline.evaluate("scrollY") == 0
    box = canvas.bounding_box()
    timeline.mouse.move(box["x"] + 500, box["y"] + 120)
    timeline.mouse.down()
    timeline.mouse.move(box["x"] + 400, box["y"] + 120, steps=4)
    timeline.mouse.up()
    assert seen(timeline)[0] > begin and seen(timeline)[1] - seen(timeline)[0] == pytest.approx(end - begin, abs=0.3)


def test_the_overview_moves_what_is_seen(timeline):
    part(timeline, "in").click()
    part(timeline, "in").click()
    canvas = part(timeline, "canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] - 12, "y": box["height"] - 20})
    assert seen(timeline)[1] == pytest.approx(5647, abs=1)
    canvas.click(position={"x": 90, "y": box["height"] - 20})
    assert seen(timeline)[0] == 0


def test_a_tile_under_the_pointer_says_what_it_is_and_a_click_keeps_it(timeline):
    canvas, tip = part(timeline, "canvas"), part(timeline, "tip")
    canvas.hover(position={"x": 400, "y": 130})
    assert re.match(r"gate_up of expert \d+, 128 rows from [\d,]+ on, column \d, ticket", tip.inner_text())
    assert "program 42." in tip.inner_text()  # of 22 lanes of 12 pixels, which begin at 40, the eighth
    canvas.hover(position={"x": 400, "y": 5})
    assert tip.is_hidden()
    canvas.click(position={"x": 400, "y": 130})
    words = part(timeline, "said").inner_text()
    assert re.search(r"program \d+\. Step gate_up\. Taken at [\d,.]+ µs\. Did not wait\. At work from", words)


def test_a_finger_chooses_a_tile_and_comes_close_to_it(browser, site):
    """All of 5647 µs in 300 pixels leaves two or three to a tile."""
    context = browser.new_context(viewport={"width": 360, "height": 1400}, has_touch=True)
    page = context.new_page()
    page.goto((site / "timeline.html").as_uri())
    box = part(page, "canvas").bounding_box()
    page.touchscreen.tap(box["x"] + 160, box["y"] + 130)
    words = part(page, "said").inner_text()
    assert words.startswith("gate_up of expert") and part(page, "tip").is_hidden()
    times = re.search(r"At work from ([\d,.]+) µs to ([\d,.]+) µs", words).groups()
    begin, end = (float(time.replace(",", "")) for time in times)
    since, until = seen(page)
    assert since < begin and end < until
    assert 25 < (end - begin) / (until - since) * (box["width"] - 38) < 31
    part(page, "out").tap()
    assert seen(page)[1] - seen(page)[0] == pytest.approx(2 * (until - since), abs=1)
    part(page, "all").tap()
    assert seen(page) == (0, float("inf"))
    context.close()


def test_keys_go_from_tile_to_tile(open_page):
    """In the small example, whose tiles are known: rank 0's programs, then rank 1's, then mega's."""
    page = open_page("timeline")
    part(page, "above").select_option(label="two ranks, forward: a launch a kind")
    assert part(page, "below").evaluate("s => s.selectedOptions[0].text") == "mega on two ranks, forward: one launch"
    while page.evaluate("document.activeElement.tagName") != "CANVAS":
        page.keyboard.press("Tab")
    assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2

    def says(key: str) -> str:
        page.keyboard.press(key)
        return part(page, "said").inner_text()

    assert says("ArrowRight").startswith("dispatch of expert 0") and "rank 0 · 0." in says("Home")
    assert "combine, " in says("End") and "rank 0 · 0." in says("End")
    assert "rank 0 · 1." in says("ArrowDown") and "rank 0 · 0." in says("ArrowUp")
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    assert "rank 1 · 2, rank 1." in says("ArrowUp").replace("rank 1 · 1", "rank 1 · 2")
    wait = says("w")
    assert "No tile drawn here waited." in wait  # launches apart
    for _ in range(8):
        page.keyboard.press("ArrowDown")
    assert re.search(r"Waited \d steps? for \d+ arrivals", says("w"))
    first = says("Home")
    assert says("ArrowRight") != first and says("ArrowLeft") == first
    assert says("+") == first and seen(page)[1] < 14
    page.keyboard.press("0")
    assert seen(page) == (0, float("inf"))
    assert says("Escape").startswith("Point at a tile")


def test_one_expert_is_kept_and_all_others_fade(timeline):
    canvas = part(timeline, "canvas")
    before = pixels(timeline, COLOURS["down"])
    canvas.click(position={"x": 250, "y": 480})
    timeline.keyboard.press("e")
    assert part(timeline, "follow").get_attribute("aria-pressed") == "true"
    assert pixels(timeline, COLOURS["down"]) < 0.8 * before
    part(timeline, "follow").click()
    assert part(timeline, "follow").get_attribute("aria-pressed") == "false"
    assert pixels(timeline, COLOURS["down"]) > 0.9 * before


def test_tall_lanes_scroll_to_the_chosen_one(timeline):
    low = part(timeline, "canvas").bounding_box()["height"]
    part(timeline, "tall").click()
    assert part(timeline, "canvas").bounding_box()["height"] > 1.3 * low
    part(timeline, "canvas").focus()
    for _ in range(22):
        timeline.keyboard.press("ArrowDown")
    assert "program 126." in part(timeline, "said").inner_text()
    part(timeline, "canvas").hover(position={"x": 400, "y": 430})  # the last lane is where the picture ends
    assert "program 126." in part(timeline, "tip").inner_text()


def test_numbers_stand_below_the_picture(timeline, examples):
    numbers = rows_of(part(timeline, "numbers"))
    both = [packed["summary"] for packed in examples["pairs"][0]["timelines"]]
    assert numbers["programs"] == ["132", "132"]
    assert numbers["dispatch and combine hidden"] == [f"{100 * of['hidden']:.1f} %" for of in both]
    assert numbers["at work"] == [f"{100 * of['shares']['busy']:.1f} %" for of in both]
    timeline.get_by_text("By kind of tile").click()
    kinds = part(timeline, "kinds").locator("table")
    assert list(rows_of(kinds.nth(1))) == ["", "dispatch", "gate_up", "down", "combine"]
    assert rows_of(kinds.nth(1))["gate_up"][0] == f"{both[1]['kinds']['gate_up']['tiles']:,}"
    assert "5,647.01 µs" in part(timeline, "canvas").get_attribute("aria-label")


def test_only_what_counts_in_the_same_unit_can_stand_below(timeline):
    choices = "s => [...s.options].filter(o => !o.disabled).map(o => o.text)"
    assert not any("two ranks" in text for text in part(timeline, "below").evaluate(choices))
    part(timeline, "below").select_option(label="mega on one GPU, forward: one launch")
    assert rows_of(part(timeline, "numbers"))["from the first program to the last tile, µs"] == ["5,647.01", "2,763.9"]
    part(timeline, "below").select_option(label="nothing")
    assert len(rows_of(part(timeline, "numbers"))["programs"]) == 1


# Files.


def hand_made() -> Trace:
    """A GPU's: two programs that wait, overlap and have gaps, and one that gets no tile."""
    table = [
        [KINDS.index("dispatch"), 0, 0, 0, 0, 100, 0, 0],
        [KINDS.index("gate_up"), 0, 0, 0, 0, 100, 0, 1],
        [KINDS.index("gate_up"), 0, 1, 1, 100, 28, 0, 0],
        [KINDS.index("down"), 0, 0, 0, 0, 100, 0, 1],
        [KINDS.index("combine"), 0, 0, 0, 0, 16, 0, 32],
    ]
    spans = [
        Span(0, 0, 1.5, 1.5, 4.0),
        Span(1, 1, 2.0, 4.0, 9.25),
        Span(0, 2, 4.5, 4.5, 8.0),
        Span(0, 3, 8.0, 9.25, 12.0),
        Span(1, 4, 10.0, 12.5, 13.0),
    ]
    machine = {"device": "NVIDIA H200", "date": "2026-11-29T00:00:00+00:00"}
    problem = dict(T=16, H=64, I=48, E=2, K=8, W=1)
    return Trace(machine, problem, "forward", "µs", table, ["SM 3", "SM 8", "SM 9"], spans)


@cache
def traced(direction: str) -> Trace:
    """A real one, over two ranks."""
    heap = LocalHeaps(2, 16)
    problem = Problem(T=24, H=32, I=24, E=4, K=2, device=DEVICE, heap=heap.key, tokens_per_rank=(16, 8))
    return trace(Layer(problem, *random_inputs(problem), "balanced", heap), direction)


def written(folder: Path, name: str, made: Trace) -> Path:
    path = folder / name
    path.write_text(json.dumps(made.as_perfetto()))
    return path


def opened(page, *paths: Path) -> None:
    """Chooses files, and waits until the page has read them."""
    before = part(page, "title").inner_text(), part(page, "wrong").inner_text()
    part(page, "file").set_input_files(paths)
    page.wait_for_function(
        "before => document.querySelector('[data-viewer=title]').innerText !== before[0]"
        " || document.querySelector('[data-viewer=wrong]').innerText !== before[1]",
        arg=before,
    )


def test_what_is_read_of_a_file_sums_up_as_its_trace_does(timeline):
    for made in (hand_made(), traced("forward"), traced("backward")):
        text = json.dumps(made.as_perfetto())
        summary = timeline.evaluate("text => readTrace(text, 'a file').summary", text)
        expected = made.as_json()
        assert list(summary["kinds"]) == list(expected["kinds"])
        for kind, of in summary.pop("kinds").items():
            assert of == pytest.approx(expected["kinds"][kind])
        assert summary.pop("shares") == pytest.approx(expected["shares"])
        assert summary == pytest.approx({name: expected[name] for name in summary})


def test_a_trace_is_opened_and_its_tiles_are_there(timeline, tmp_path):
    made = hand_made()
    opened(timeline, written(tmp_path, "mine.json", made))
    assert part(timeline, "title").inner_text() == "mine.json"
    assert part(timeline, "made").inner_text() == "traced on NVIDIA H200 2026-11-29, 2 of 3 programs drawn."
    numbers = rows_of(part(timeline, "numbers"))
    assert numbers["programs"] == ["3"] and numbers["from the first program to the last tile, µs"] == ["13"]
    assert numbers["waiting with a tile"] == [f"{100 * made.shares()['waiting']:.1f} %"]

    part(timeline, "canvas").focus()
    timeline.keyboard.press("w")
    assert part(timeline, "said").inner_text() == (
        "gate_up of expert 0, 100 rows from 0 on, column 0, ticket 1; SM 8. Step gate_up. Taken at 2 µs. "
        "Waited 2 µs for 1 arrival. At work from 4 µs to 9.25 µs: 5.25 µs."
    )
    part(timeline, "below").select_option(label="mega on one GPU, forward: one launch")  # beside what is predicted
    assert rows_of(part(timeline, "numbers"))["programs"] == ["3", "132"]


def test_two_traces_are_opened_one_above_the_other(timeline, tmp_path):
    paths = [written(tmp_path, f"{direction}.json", traced(direction)) for direction in DIRECTIONS]
    opened(timeline, *paths)
    numbers = rows_of(part(timeline, "numbers"))
    assert [title[:20] for title in numbers[""]] == ["above: forward.json:", "below: backward.json"]
    assert pixels(timeline, COLOURS["swiglu"]) > 100  # dact is backward's
    assert part(timeline, "wrong").inner_text() == ""


def test_two_traces_that_count_in_different_units_are_not_compared(timeline, tmp_path):
    other = hand_made()
    paths = [written(tmp_path, "a.json", other), written(tmp_path, "b.json", traced("forward"))]
    opened(timeline, *paths)
    if DEVICE == "cpu":
        assert part(timeline, "wrong").inner_text() == "They count time in µs and tiles, so only the first is shown."
        assert len(rows_of(part(timeline, "numbers"))["programs"]) == 1


def broken(change) -> str:
    """A trace's file with something wrong in its first tile."""
    return changed(lambda data: change(next(event for event in data["traceEvents"] if event["ph"] == "X")))


def changed(change) -> str:
    """A trace's file with something wrong anywhere."""
    data = hand_made().as_perfetto()
    change(data)
    return json.dumps(data)


def scale(data: dict, by: float) -> None:
    """Multiplies all times."""
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            event.update(ts=event["ts"] * by, dur=event["dur"] * by)


def first_wait(data: dict) -> dict:
    return next(event for event in data["traceEvents"] if event["name"] == "waiting")


def first_name(data: dict) -> dict:
    return next(event for event in data["traceEvents"] if event["name"] == "thread_name")["args"]


WRONG = {
    "a picture": ("<svg></svg>", "is not JSON."),
    "the summary": (json.dumps(hand_made().as_json()), "is the summary that “mega-moe trace --json” prints"),
    "another JSON": ('{"rows": []}', "is no trace: it has no traceEvents"),
    "null": ("null", "is no trace"),
    "a profiler's": (
        json.dumps({"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}),
        "is a trace of something else: none of its events is a tile",
    ),
    "no time": (broken(lambda event: event.pop("dur")), "the times of tile 0 are missing, or run backwards"),
    "words": (broken(lambda event: event.update(ts="soon")), "the times of tile 0 are missing, or run backwards"),
    "backwards": (broken(lambda event: event.update(dur=-1)), "the times of tile 0 are missing, or run backwards"),
    "another kind": (broken(lambda event: event["args"].update(kind="stir")), "tile 0 is of kind “stir”"),
    "no kind": (broken(lambda event: event["args"].update(kind={"toString": 1})), "kind or step of tile 0 is missing"),
    "null for a time": (broken(lambda event: event.update(dur=None)), "the times of tile 0 are missing"),
    "null for a wait": (changed(lambda data: first_wait(data).update(ts=None)), "the times of tile 1 are missing"),
    "below 0": (broken(lambda event: event.update(ts=-2)), "tile 0 lasts from -2 to "),
    "too long": (
        broken(lambda event: event.update(dur=1e308)),
        "to 1e+308; this page draws times from 0 to 1,000,000,",
    ),
    "too short": (changed(lambda data: scale(data, 1e-322)), "this page draws what lasts at least 0.001"),
    "facts that are text": (changed(lambda data: data.update(otherData="mine")), 'must be an object, not "mine"'),
    "facts that are a number": (changed(lambda data: data.update(otherData=3)), "must be an object, not 3"),
    "a name that is none": (
        changed(lambda data: first_name(data).update(name=None)),
        "the name of thread 0 must be text",
    ),
    **{
        f"{name} that is no text": (
            changed(lambda data, name=name: data["otherData"].update({name: 7})),
            f"{name} in its otherData must be text",
        )
        for name in ("direction", "unit", "device", "date")
    },
    **{
        f"{name} that is no number": (
            changed(lambda data, name=name: data["otherData"].update({name: "many"})),
            f"{name} in its otherData must be a whole number",
        )
        for name in (*"THIEKW", "lanes")
    },
    **{
        f"no {name}": (broken(lambda event, name=name: event["args"].pop(name)), f"{name} of tile 0 is missing")
        for name in ("expert", "block", "row", "rows", "column", "arrivals")
    },
    **{
        f"no {name}": (broken(lambda event, name=name: event.pop(name)), f"{name} of tile 0 is missing")
        for name in ("pid", "tid")
    },
}


def test_a_wrong_file_says_what_is_wrong_and_changes_nothing(timeline, tmp_path):
    before = part(timeline, "numbers").inner_text()
    assert part(timeline, "wrong").get_attribute("role") == "alert"
    for name, (text, message) in WRONG.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        opened(timeline, path)
        words = part(timeline, "wrong").inner_text()
        assert words.startswith(f"{name}.json") and message in words
        assert part(timeline, "numbers").inner_text() == before
    opened(timeline, written(tmp_path, "right.json", hand_made()))
    assert part(timeline, "wrong").inner_text() == ""


@pytest.mark.parametrize("by", [0, 1e-4, 7e10])
def test_a_file_whose_times_are_just_within_bounds_is_drawn(timeline, tmp_path, by):
    """As far in as the picture goes; of more lanes than any device has."""
    path = tmp_path / "mine.json"
    path.write_text(changed(lambda data: (scale(data, by), data["otherData"].update(lanes=2**53 - 1))))
    opened(timeline, path)
    assert part(timeline, "title").inner_text() == "mine.json"
    for _ in range(18):
        part(timeline, "in").click()
    part(timeline, "canvas").focus()
    for key in ("ArrowRight", "Home"):
        timeline.keyboard.press(key)
    assert part(timeline, "said").inner_text().startswith("dispatch of expert 0, 100 rows")
    for table in ("numbers", "kinds"):
        assert not re.search("NaN|∞", part(timeline, table).text_content())


def test_the_file_to_try_is_one_that_opens(timeline, site):
    opened(timeline, site / "js/trace.json")
    assert part(timeline, "wrong").inner_text() == "" and part(timeline, "title").inner_text() == "trace.json"


# The explorer.


def layers() -> list[dict]:
    """Real ones, small ones, one row alone, and many at random up to where doubles end."""
    draw = random.Random(0)
    found = [{letter: getattr(p, letter) for letter in "THIEK"} for p in PRESETS.values()]
    found += [dict(T=1, H=1, I=1, E=1, K=1), dict(T=3, H=10, I=100, E=5, K=2), dict(T=1, H=64, I=32, E=128, K=1)]
    while len(found) < 200:
        sizes = {letter: round(2 ** draw.uniform(0, high)) for letter, high in zip("THIEK", (18, 14, 14, 9, 5))}
        found.append(sizes)
    return [sizes | {"dtype": draw.choice(("bf16", "fp16", "fp32"))} for sizes in found]


def as_problem(layer: dict) -> Problem:
    return Problem(**layer | {"dtype": DTYPES[layer["dtype"]]})


def costs(of: dict) -> dict:
    return {name: {"flops": cost.flops, "bytes": cost.bytes} for name, cost in of.items()}


@both_directions
def test_its_formulas_are_those_of_the_library(explorer, direction):
    several = layers()
    found = explorer.evaluate(
        """([layers, direction]) => layers.map((layer) => ({
            steps: stepsOf(layer, direction),
            tiles: tilesOf(layer, direction),
            fused: { least: fusedOf(layer, direction) },
            bills: billsOf(layer, direction),
            allowed: ROOFLINE.ceilings.map((ceiling) => allowedMs(layer, direction,
                { tflops: tflopsOf(ceiling, layer.dtype), gb_per_s: ceiling.gb_per_s })),
        }))""",
        [several, direction],
    )
    kernels = ("gate_up", "down", "y") if direction == "forward" else ("dact", "drows", "dx", "dw_gate_up", "dw_down")
    for layer, of in zip(several, found, strict=True):
        p = as_problem(layer)
        assert max(cost.flops for cost in roofline.tiles(p).values()) * 8 < EXACT or layer["T"] > 1
        expected = {
            "steps": costs(roofline.steps(p, direction)),
            "tiles": costs({name: roofline.tiles(p)[name] for name in kernels}),
            "fused": costs({"least": roofline.fused(p, direction)}),
            "bills": roofline.bills(p, direction),
        }
        for name, numbers in expected.items():
            assert list(of[name]) == list(numbers), layer
            for key in numbers:
                for what, number in numbers[key].items():
                    known = of[name][key][what]
                    assert known == number if number < EXACT else known == pytest.approx(number, rel=1e-12), layer
        allowed = [roofline.allowed_ms(p, direction, ceiling) for _, ceiling in CEILINGS]
        assert of["allowed"] == pytest.approx(allowed, rel=1e-12), layer


@both_directions
def test_from_how_many_tokens_on_flops_take_longer(explorer, direction):
    h200 = roofline.ceiling("NVIDIA H200")
    device = {"tflops": h200.tflops_16, "gb_per_s": h200.gb_per_s}

    def longer(p: Problem) -> bool:
        cost = roofline.fused(p, direction)
        return cost.flops / (h200.tflops_16 * 1e9) >= cost.bytes / (h200.gb_per_s * 1e6)

    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        layer = {letter: getattr(PRESETS[name], letter) for letter in "THIEK"} | {"dtype": "bf16"}
        T = explorer.evaluate("asked => boundByFlopsFrom(...asked)", [layer, direction, device])
        assert longer(PRESETS[name].at(T=T)) and not longer(PRESETS[name].at(T=T - 1))
    layer = dict(T=1, H=16, I=16, E=8, K=2, dtype="bf16")
    assert explorer.evaluate("asked => boundByFlopsFrom(...asked)", [layer, direction, device]) is None


def test_it_begins_with_a_layer_of_the_records(explorer):
    said = field(explorer, "said").inner_text()
    assert "The ceiling is 1.25 ms." in said and "so flops take longer" in said
    steps = rows_of(field(explorer, "steps"))
    assert list(steps) == ["step", "dispatch", "gate_up", "swiglu", "down", "combine", "together"]
    assert steps["gate_up"][:3] == ["0.833 ms", "0.364 ms", "flops"]
    assert steps["combine"][:3] == ["–", "0.126 ms", "bytes"]
    assert "gate_up at 473 flops a byte" in field(explorer, "roof").get_attribute("aria-label")


def test_another_layer_by_keys(explorer):
    field(explorer, "T").focus()
    explorer.keyboard.press("Control+a")
    explorer.keyboard.type("16")
    said = field(explorer, "said").inner_text()
    least = roofline.allowed_ms(PRESETS["qwen3-30b-a3b"].at(T=16), "forward", roofline.ceiling("NVIDIA H200"))
    assert "so bytes take longer" in said and f"The ceiling is {least:.3f} ms." in said
    assert field(explorer, "layer").evaluate("s => s.selectedOptions[0].text") == "my own"

    field(explorer, "dtype").select_option("fp32")
    assert field(explorer, "tflops").input_value() == "67"
    field(explorer, "device").select_option(label="B200")
    assert (field(explorer, "tflops").input_value(), field(explorer, "gb_per_s").input_value()) == ("75", "7700")
    field(explorer, "gb_per_s").fill("1000")
    assert field(explorer, "device").evaluate("s => s.selectedOptions[0].text") == "my own"
    assert field(explorer, "source").inner_text() == "Your own figures."
    field(explorer, "layer").select_option("qwen3-235b-a22b")
    assert field(explorer, "H").input_value() == "4096"


def test_backward_of_a_rung_that_gathers(explorer):
    explorer.get_by_label("backward").press("Space")
    explorer.get_by_label("gathered and fused").click()
    assert list(rows_of(field(explorer, "steps")))[1:-1] == ["dact", "drows", "dx", "dw_gate_up", "dw_down"]
    assert "The ceiling is 2.50 ms." in field(explorer, "said").inner_text()


@both_directions
def test_the_table_says_which_rung_saves_which_bytes(explorer, direction):
    explorer.get_by_label(direction).check()
    table = rows_of(field(explorer, "bills"))
    assert table[""] == ["grouped", "swiglu", "gather and up", "the least"] and len(BILLED) == 4
    gone = {tensor: [n for n, cell in enumerate(cells) if "−" in cell] for tensor, cells in table.items()}
    by_swiglu = [tensor for tensor, rungs in gone.items() if 1 in rungs]
    by_gather = [tensor for tensor, rungs in gone.items() if 2 in rungs]
    assert by_swiglu == (["pre"] if direction == "forward" else ["dact"])
    assert by_gather == (["rows"] if direction == "forward" else ["dy_rows", "rows"])
    p = PRESETS["qwen3-30b-a3b"]
    grouped = sum(cost.bytes for cost in roofline.steps(p, direction).values())
    assert table["all"][0] == f"{grouped / 1e9:.2f} GB"


def test_a_wrong_number_says_so_and_changes_nothing(explorer):
    for right, (letter, value) in enumerate([("T", ""), ("T", "0"), ("H", "2.5"), ("K", "-1"), ("E", "1000000")]):
        before = field(explorer, "said").inner_text()
        field(explorer, letter).fill(value)
        assert f"{letter} must be a whole number from 1 to" in field(explorer, "wrong").inner_text()
        assert field(explorer, letter).get_attribute("aria-invalid") == "true"
        assert field(explorer, "said").inner_text() == before
        field(explorer, letter).fill(f"{right + 2}")
        assert field(explorer, "wrong").inner_text() == "" and field(explorer, "said").inner_text() != before


def test_a_rate_beyond_its_bounds_says_so_and_changes_nothing(explorer):
    """Some are numbers whose ridge is none: infinite, or 0."""
    before = field(explorer, "said").inner_text()
    for name, words in (("tflops", "The matrix rate"), ("gb_per_s", "The bandwidth")):
        rate, right = field(explorer, name), field(explorer, name).input_value()
        for value in ("", "0", "-1", "1e306", "1e-306", "0.0009", "1000001"):
            rate.fill(value)
            assert f"{words} must be a number from 0.001 to 1,000,000." in field(explorer, "wrong").inner_text()
            assert rate.get_attribute("aria-invalid") == "true" and field(explorer, "said").inner_text() == before
        rate.fill(right)
        assert field(explorer, "wrong").inner_text() == "" and rate.get_attribute("aria-invalid") == "false"


@pytest.mark.parametrize(
    "tflops, gb_per_s, ridge", [("1000000", "0.001", "1,000,000,000,000"), ("0.001", "1000000", "0.00000100")]
)
def test_the_roof_is_drawn_up_to_the_bounds(explorer, tflops, gb_per_s, ridge):
    field(explorer, "tflops").fill(tflops)
    field(explorer, "gb_per_s").fill(gb_per_s)
    roof = field(explorer, "roof")
    assert field(explorer, "wrong").inner_text() == "" and f"ridge at {ridge}" in roof.get_attribute("aria-label")
    assert "NaN" not in roof.inner_html() and "Infinity" not in roof.inner_html()


# Both pages, wherever they are read.


@pytest.mark.parametrize("wide", [360, 1280])
@pytest.mark.parametrize("name", ["timeline", "roofline"])
def test_a_page_is_as_wide_as_its_window(open_page, name, wide):
    page = open_page(name, wide)
    assert page.evaluate("document.documentElement.scrollWidth") <= wide
    for control in page.locator(".viewer :is(select, button, input):visible").all():
        box = control.bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= wide


def test_dark_is_dark_and_the_picture_follows_the_switch(open_page):
    page = open_page("timeline", scheme="dark")
    paper = "getComputedStyle(document.querySelector('.viewer')).backgroundColor"
    ink = lambda: page.evaluate("document.querySelector('canvas').toDataURL()")
    dark, before = page.evaluate(paper), ink()
    page.locator("label[for=__palette_0]:visible, label[for=__palette_1]:visible").first.click()
    page.wait_for_function(f"before => {paper} !== before", arg=dark)
    page.wait_for_function("before => document.querySelector('canvas').toDataURL() !== before", arg=before)
    light = page.evaluate(paper)
    brightness = lambda colour: sum(map(int, re.findall(r"\d+", colour)[:3]))
    assert brightness(dark) < 200 < 600 < brightness(light)


@pytest.mark.parametrize("name", ["timeline", "roofline"])
def test_every_control_has_a_name(open_page, name):
    page = open_page(name)
    controls = page.locator(".viewer :is(select, button, input)")
    assert controls.count() >= 8
    for control in controls.all():
        assert control.evaluate("c => (c.labels?.[0]?.innerText || c.innerText || '').trim()")
