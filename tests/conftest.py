"""What all tests share: where they run, the rungs they run on, poison, and the time that each part may take."""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, below
    torch.set_num_threads(1)  # layers this small only lose by more, and the other core runs other tests

from cases import DEVICE, able, poisoned

from mega_moe.registry import LADDER, Rung, stage

if DEVICE == "cpu" and find_spec("triton"):
    import interpreter

    interpreter.install()

SLICES = {
    "a rung": 80,
    "ranks": 400,
    "kernels": 230,
    "compile": 120,
    "cross-compile": 640,
    "lessons": 360,
    "the rest": 430,
}
"""Seconds of one core that each part of the suite may take on a CPU, so that all of it stays within 18 minutes on two
cores as the ladder grows. Each rung has a slice of its own; so have the tests of single kernels, of which every rung
adds some."""

PARTS = {
    "test_compile": "compile",
    "test_waits": "ranks",  # with all else that programs at once can break
    "ranks/": "ranks",
    "cross_compile": "cross-compile",
    "kernels/": "kernels",
    "test_lessons": "lessons",
    "test_site": "lessons",  # who comes first of these builds the site, and runs the lessons
    "test_browser": "lessons",
    "test_viewer": "lessons",
    "test_module": "the rest",
    "test_faults": "the rest",  # they test the tests
}
"""The slice of a file whose name, with its folder's, contains the word: that of the first that does. Elsewhere a test
that runs on a rung counts to that rung."""


@pytest.hookimpl(trylast=True)  # after the test's own parameters: the rungs follow each other within a case
def pytest_generate_tests(metafunc):
    """Every test that takes a `rung` runs once on each rung of the ladder."""
    if "rung" in metafunc.fixturenames:
        metafunc.parametrize("rung", [rung.name for rung in LADDER], indirect=True)


@pytest.fixture
def rung(request) -> Rung:
    """A rung of the ladder; the test is skipped, with its why_not, where it cannot run."""
    return able(stage(request.param))


@pytest.fixture
def fused(rung) -> Rung:
    """A rung of kernels: these promise never to wait for the device, and to do no more than they must."""
    if not rung.needs_triton:
        pytest.skip("the reference loops over experts on the host and promises nothing of this")
    return rung


@pytest.fixture
def poison():
    """Memory that nobody wrote holds NaN, or the largest integer."""
    with poisoned():
        yield


@pytest.fixture
def tiles_of_many_rows(monkeypatch):
    """One rank uses the tiles that ranks use, whatever the number of rows: then both must be equal to the bit."""
    if find_spec("triton"):
        from mega_moe.kernels import blocks

        monkeypatch.setattr(blocks, "few_for", lambda problem: None)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The documentation, built once for all who look at it: they are in the xdist group "site", after the lessons."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert build.returncode == 0, build.stdout
    return folder


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, driven by Playwright. Its event loop ends with the module: others have their own."""
    driven_by = "Playwright drives the browser: pip install playwright"
    sync_api = pytest.importorskip("playwright.sync_api", reason=driven_by)
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium to show pages: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


# The time that each part takes.


class Clock:
    """Notes on every report whose time it is and how much of it passed: of cores, so that a busy machine counts as a
    quiet one, and with subprocesses. Runs in every process."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.last = core_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        report.slice, now = slice_of(item), core_seconds()
        report.core_seconds, self.last = now - self.last, now
        return report


def core_seconds() -> float:
    """What this process and its finished children have used so far."""
    return sum(os.times()[:4])


def slice_of(item: pytest.Item) -> str:
    """Whose time a test's is."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    elsewhere = f"rung {params['rung']}" if "rung" in params else "the rest"
    name = f"{item.path.parent.name}/{item.path.stem}"
    return next((part for word, part in PARTS.items() if word in name), elsewhere)


class Slices:
    """Sums the time by slice, in the one process that hears of all tests. Over a slice the session fails where CI is
    set in the environment: there the machine is known. Elsewhere it may just be slow, and is told."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "slice"):  # the report of a crashed xdist worker has none
            self.seconds[report.slice] += report.core_seconds

    def over(self) -> list[str]:
        """The slices that took longer than they may."""
        return [part for part, seconds in self.seconds.items() if seconds > allowed(part)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.over() and os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        parts = [f"{part} {seconds:.0f} of {allowed(part)}" for part, seconds in sorted(self.seconds.items())]
        terminalreporter.line(f"core-seconds by part: {', '.join(parts)}")
        for part in self.over():
            terminalreporter.line(f"{part} takes longer than it may: make its tests smaller", red=True)


def allowed(part: str) -> int:
    """Seconds for a slice."""
    return SLICES["a rung" if part.startswith("rung ") else part]


IGNORED = (
    "ignore:(overflow|invalid value) encountered:RuntimeWarning",  # numpy, on Inf and NaN in an interpreted kernel
    "ignore:.*does not have a deterministic implementation:UserWarning",  # poison turns that mode on for its filling
    "ignore:.*CUBLAS_WORKSPACE_CONFIG:UserWarning",
)


def pytest_configure(config):
    """Slices are for what a commit must pass on a CPU: neither the full product nor a GPU."""
    for warning in IGNORED:
        config.addinivalue_line("filterwarnings", warning)
    config.pluginmanager.register(Clock(), "clock")
    if DEVICE == "cpu" and config.option.markexpr == "not full" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Slices(), "slices")
