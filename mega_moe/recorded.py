"""What was measured, as lessons quote it: the newest record in the checkout's docs/results.

Lessons quote times beside what they predict, and no lesson types one. Where there is no checkout (an installed wheel)
there is no record, and it says so.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Record:
    """One run of the benchmarks; false if there is none.

    Attributes:
        machine: the device, the date and the versions.
        problems: the facts of each layer that was measured, by its name.
        rows: what was measured, by (layer, contestant, what). `what` is "forward", "backward", "forward+backward", or
            one of a rung's products alone: "gate_up", "down", "dact", "drows", "dw_gate_up", "dw_down".
    """

    machine: dict[str, str] = field(default_factory=dict)
    problems: dict[str, dict] = field(default_factory=dict)
    rows: dict[tuple[str, str, str], dict] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        """On what and when, to stand above times."""
        if not self:
            return (
                "No record is here: recorded runs are in docs/results of the checkout. On a GPU, `make bench` measures."
            )
        m = self.machine
        return f"{m['device']}, {m['date']}, torch {m['torch']}, triton {m['triton']}, medians"

    def ms(self, shape: str, contestant: str, what: str) -> float | None:
        """The median in milliseconds; None if it is not in this run."""
        row = self.rows.get((shape, contestant, what))
        return row and row["ms"]["median"]

    def peak_MiB(self, shape: str, contestant: str, what: str = "forward+backward") -> float | None:
        """The most memory that was taken over the inputs, in MiB; None if it is not in this run."""
        row = self.rows.get((shape, contestant, what))
        return row and row["peak_bytes"] and row["peak_bytes"] / 2**20


def newest(folder: Path = RECORDS) -> Record:
    """The newest record in a folder (their names begin with the date), or an empty one."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        return Record()
    record = json.loads(paths[-1].read_text())
    rows = {(row["shape"], row["contestant"], row["gemm"] or row["direction"]): row for row in record["rows"]}
    return Record(record["machine"], record["problems"], rows)
