"""Pages spell the words of docs/glossary.md as it does: one word for one thing, and one way to write it.

Seen are other joints: "gate-up" or "GateUp" for gate_up, "row-block" for row block, "all-to-all" for all_to_all.
Whether a page uses another word altogether, only a reader can tell.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tutorials/*.py")])
FENCED = r"^(?P<indent> *)```.*?^(?P=indent)```"
INDENTED = r"(?<=\n\n)(?: {4}.*\n)+"
CODE = re.compile(rf"{FENCED}|{INDENTED}|`[^`]+`|\$[^$]+\$|<[^>]+>|\]\([^)]*\)|https?://\S+", re.MULTILINE | re.DOTALL)
JOINT = re.compile(r"[-_ ]")


def terms(glossary: str) -> set[str]:
    """What is defined: the terms of definitions, and the names of tensors."""
    lines = glossary.splitlines()
    heads = [line for line, below in pairwise(lines) if below.startswith(":   ")]
    names = re.findall(r"^\| ([\w, +]+) \| \(", glossary, re.MULTILINE)
    return {term.strip() for several in [*heads, *names] for term in several.split(",")}


def prose(page: Path) -> str:
    """A page without its code, formulas and addresses; of a lesson the text cells."""
    text = page.read_text()
    if page.suffix == ".py":
        cells = [cell for cell in text.split("# %%") if cell.startswith(" [markdown]")]
        text = "\n".join(line[2:] for cell in cells for line in cell.splitlines()[1:])
    return CODE.sub(" ", text)


def misspelt(text: str, known: set[str]) -> list[str]:
    """Terms that the text joins in another way than the glossary does. Words with an underscore are English words too
    ("why not"), so there a space is no other joint."""
    fold = lambda term: JOINT.sub("", term).lower()
    spellings = {fold(term) for term in known}
    right = {spelling for term in known for spelling in (term, term[0].upper() + term[1:])}
    found = []
    for term in sorted(known):
        parts = JOINT.split(term)
        if len(parts) > 1:
            joint = "[-_]?" if "_" in term else "[-_ ]?"
            for match in re.finditer(rf"(?<![\w-]){joint.join(parts)}(?![\w-])", text, re.IGNORECASE):
                if match[0] not in right and fold(match[0]) in spellings:
                    found.append(match[0])
    return found


def test_the_glossary_is_read():
    known = terms(GLOSSARY.read_text())
    assert {"gate_up", "SwiGLU", "row block", "w_gate_up", "topk_ids", "why_not", "all_to_all", "bit-equal"} <= known
    assert len(known) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_spells_terms_as_the_glossary_does(page):
    assert not misspelt(prose(page), terms(GLOSSARY.read_text()))


@pytest.mark.parametrize(
    "text, seen",
    [
        ("the gate-up tiles", ["gate-up"]),
        ("GateUp, a row-block", ["GateUp", "row-block"]),
        ("an alltoall, bit equal", ["alltoall", "bit equal"]),
        ("gate_up, Row blocks, a row block, why not, bit-equal", []),
    ],
)
def test_another_spelling_is_seen(text, seen):
    assert sorted(misspelt(text, terms(GLOSSARY.read_text()))) == sorted(seen)
