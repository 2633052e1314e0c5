"""What the README and two pages tell a newcomer to type runs as it stands, and prints what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


EXAMPLES = [
    (page, code) for page in ("README.md", "docs/howto.md", "docs/parity.md") for code in blocks(page, "python")
]


def test_there_are_examples():
    assert [page for page, _ in EXAMPLES] == ["README.md", "README.md", "docs/howto.md", "docs/parity.md"]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[f"{page}-{at}" for at, (page, _) in enumerate(EXAMPLES)])
def test_an_example_runs_and_prints_what_its_page_says(page, code, capsys):
    """Each block by itself, as one would paste it. A seeded one draws on the
    CPU, so that it prints the same everywhere."""
    with torch.random.fork_rng():
        exec(compile(code, page, "exec"), {"__name__": "__main__"})

    printed = capsys.readouterr().out
    assert printed
    if "manual_seed" in code:
        assert printed in blocks(page, "text")


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
MADE_BY_THE_SITE = {"js/trace.json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_in_the_checkout(page):
    """So they do on GitHub. The site's own links are looked at where it is built."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path = link.partition("#")[0]
        if path and ":" not in path and path not in MADE_BY_THE_SITE:
            assert (page.parent / path).exists(), link


@pytest.mark.skipif(torch.cuda.is_available(), reason="it shows how ranks meet without a GPU")
def test_two_ranks_on_a_cpu_print_what_their_page_says(tmp_path):
    (program,) = (code for code in blocks("docs/running.md", "py") if "two_ranks" not in code and "MoE(" in code)
    (tmp_path / "two_ranks.py").write_text(program)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "two_ranks.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    (shown,) = (text for text in blocks("docs/running.md", "text") if text.startswith("rank 0: y"))
    printed = ran.stdout
    for line in shown.splitlines():  # in any order; what two processes print may even stand on one line
        assert printed.count(line) == 1
        printed = printed.replace(line, "")
    assert not printed.strip()
