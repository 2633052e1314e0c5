"""What `mega-moe ladder` and `mega-moe tune` show: what they are doing, and tables at the end. Needs rich."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .ladder import Climb, Row, plain, plain_share
from .parity import OUTPUTS, SMALL
from .roofline import DIRECTIONS

if TYPE_CHECKING:
    from .tune import Timed, Tuning  # which imports Triton

UNKNOWN = "–"
WIDTH = 120  # where the output is no terminal, whose width would be known


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to the program, whose exit code it decides; rich would exit with 1."""
        raise


def _console() -> Console:
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar of `steps` steps on stderr, if that is a terminal, gone when the context ends.

    Yields the function that moves it by one step and says what that step is.
    """
    columns = SpinnerColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)

        def doing(what: str) -> None:
            bar.update(task, description=what)
            bar.advance(task)

        yield doing


def show(climb: Climb, name: str) -> None:
    """Print the machine, the problem, both tables, and what there is to say about each rung."""
    console = _console()
    p = climb.problem
    sizes = "  ".join(f"{letter}={p[letter]}" for letter in "THIEK")
    ranks = f"  ranks: {p['W']}" if p["W"] > 1 else ""
    dtype = f"{p['dtype']}, products {p['precision']}" if p["precision"] else p["dtype"]
    console.print(f"[bold]{escape(name)}[/]  {sizes}  {dtype}  routing: {p['routing']}  save: {p['save']}{ranks}")
    console.print(f"[dim]{escape(climb.where)}[/]\n")

    ran = [row for row in climb.rows if row.parity]
    if ran:
        console.print(_parity(ran))
        if climb.fixed_budget:
            console.print(
                f"[dim]sizes under {SMALL} are judged against {climb.fixed_budget}: over so few columns the "
                "reference's own rounding is no measure[/]"
            )
        console.print()
        console.print(_cost(ran, climb.allowed_ms))
        console.print()
    for row in climb.rows:
        if row.why_not:
            console.print(f"[yellow]{row.stage} cannot run:[/] {escape(row.why_not)}")
    for note, of_note in groupby(ran, key=lambda row: row.note):
        if note:
            console.print(f"[dim]{', '.join(row.stage for row in of_note)}: {escape(note)}[/]")
    if not ran:
        console.print("\n[bold red]nothing ran[/]")
    elif climb.passed:
        console.print(f"\n[bold green]parity passed[/]: {len(ran)} of {len(climb.rows)} rungs ran")
    else:
        failed = "; ".join(f"{row.stage}: {', '.join(row.parity.failed)}" for row in ran if row.parity.failed)
        console.print(f"\n[bold red]parity failed[/]: {failed}")


def _parity(rows: list[Row]) -> Table:
    title = "error of the worst row, as a share of its budget (up to 1 passes)"
    table = Table(title=title, title_justify="left", title_style="italic", box=SIMPLE_HEAD)
    table.add_column("stage")
    for name in OUTPUTS:
        table.add_column(name, justify="right")
    table.add_column("parity")
    for row in rows:
        shares = row.parity.shares.values()
        cells = [plain_share(share) if share <= 1 else f"[red]{plain_share(share)}[/]" for share in shares]
        table.add_row(row.stage, *cells, "[green]passed[/]" if row.parity.passed else "[bold red]FAILED[/]")
    return table


def _cost(rows: list[Row], allowed_ms: dict[str, float] | None) -> Table:
    """One row a rung; columns that no rung fills are left out."""
    columns: dict[str, Callable[[Row], str]] = {
        "launches": lambda row: _pair(row.launches, "{:,d}".format),
        "forward, ms": lambda row: _time(row, "forward"),
        "backward, ms": lambda row: _time(row, "backward"),
        "TFLOP/s": lambda row: _rates(row.tflops),
        "of ceiling": lambda row: _pair(row.share_of_ceiling, "{:.0%}".format),
        "peak": lambda row: UNKNOWN if row.peak_bytes is None else _size(row.peak_bytes),
        "copied": lambda row: _size(row.copied_bytes) if row.copied_bytes else UNKNOWN,
        "kernels": lambda row: "interpreted" if row.interpreted else UNKNOWN,
    }
    title = "launches, time (median ± spread) and rates; forward / backward"
    if allowed_ms:
        title += f"; the hardware allows {_pair(allowed_ms, plain)} ms"
    table = Table(title=title, title_justify="left", title_style="italic", box=SIMPLE_HEAD)
    table.add_column("stage")
    cells = {header: [column(row) for row in rows] for header, column in columns.items()}
    shown = {header: column for header, column in cells.items() if any(cell != UNKNOWN for cell in column)}
    for header in shown:
        table.add_column(header, justify="right")
    for at, row in enumerate(rows):
        table.add_row(row.stage, *(column[at] for column in shown.values()))
    return table


def _time(row: Row, direction: str) -> str:
    """Median, and the spread in per cent of it, if there is one."""
    if not row.ms:
        return UNKNOWN
    ms, spread = row.ms[direction], row.spread[direction]
    return plain(ms) if spread is None else f"{plain(ms)} ±{spread / ms:.0%}"


def _rates(tflops: dict[str, float] | None) -> str:
    """A CPU's rates are not worth their digits."""
    return "<0.01" if tflops and max(tflops.values()) < 0.01 else _pair(tflops, plain)


def _pair(values: dict[str, float] | None, text: Callable[[float], str]) -> str:
    return " / ".join(text(values[d]) for d in DIRECTIONS) if values else UNKNOWN


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{plain(size)} {unit}"


def show_tiles(tuning: "Tuning", name: str) -> None:
    """Print the machine, the layer, and a table for each kernel: its tiles, the fastest first, and why others have no
    time."""
    console = _console()
    p, m = tuning.problem, tuning.machine
    console.print(f"[bold]{escape(name)}[/]  " + "  ".join(f"{letter}={getattr(p, letter)}" for letter in "THIEK"))
    console.print(f"[dim]{escape(m['device'])}, torch {m['torch']}, triton {m['triton']}, {m['date']}[/]\n")
    for kernel, rows in tuning.rows.items():
        console.print(_tiles(tuning, kernel, sorted((row for row in rows if row.ms), key=lambda row: row.median)))
        for row in rows:
            if row.why_not:
                style = "bold red" if row.wrong else "dim"
                console.print(f"  [{style}]{kernel}, {escape(row.tile_text)}: {escape(row.why_not)}[/]")
        console.print()


def _tiles(tuning: "Tuning", kernel: str, rows: "list[Timed]") -> Table:
    title = f"{kernel}: ms a launch, median ± half the range"
    dense_ms = tuning.dense_ms.get(kernel)
    if dense_ms:
        title += f"; the dense product takes {plain(dense_ms)} ms"
    table = Table(title=title, title_justify="left", title_style="italic", box=SIMPLE_HEAD)
    table.add_column("tile")
    for header in ("ms", "TFLOP/s", "of dense", "off", "spills", ""):
        table.add_column(header, justify="right")
    for row in rows:
        chosen = row.tile == tuning.chosen[kernel]
        table.add_row(
            row.tile_text,
            f"{row.median:.3f} ±{row.spread:.3f}",
            plain(row.tflops(tuning.problem)),
            f"{dense_ms / row.median:.0%}" if dense_ms else UNKNOWN,
            f"{row.error:.0e}" if row.error else "0",
            str(row.spills),
            "chosen" if chosen else "",
            style="bold" if chosen else None,
        )
    return table
