"""mega-moe: what can run here, whether it is right, and how fast it is.

    mega-moe doctor     what this machine is, and which rungs it can run; how much memory ranks would take
    mega-moe ladder     one layer on every rung: parity, launches, time, memory
    mega-moe bench      the benchmarks, which also measure what people use today
    mega-moe schedule   the tiles of a layer in one launch: their order, what they wait for, and how that goes
    mega-moe predict    how long a layer would take over ranks with a GPU each, and what bounds it
    mega-moe trace      the same launch as it really went: when each tile waited and worked, and on which processor
    mega-moe tune       the block sizes of the persistent kernels, measured again

Where there is no GPU the rungs run in Triton's interpreter, and torch runs on one thread: layers that a CPU can take
are too small to share, and on a busy machine threads that wait for each other spoil every time. Both are chosen here,
the interpreter by TRITON_INTERPRET=1 in the environment before anything imports Triton; the library does neither.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch

from . import bench, doctor, ladder, simulate
from .ladder import DTYPES
from .registry import LADDER, Rung, stage
from .roofline import DIRECTIONS
from .routing import plan
from .samples import ROUTINGS, load_layer, random_inputs
from .schedule import home_of_row, schedule
from .shapes import PRECISIONS, PRESETS, SAVES, Inputs, Need, Problem
from .symmetric import LocalHeaps, shares

PATIENCE = 300  # seconds that a run on a CPU may take without --force

INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell reports for a program that SIGINT or SIGPIPE ended


class Refused(Exception):
    """What the user asked for cannot be done; the message is one line and says what can."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns its exit code: 0, 1 where parity or a benchmark failed, 2 for what was refused; after
    Ctrl-C 130, and 141 where nobody reads the output any more."""
    try:
        try:
            arguments = _parser().parse_args(argv)
            return arguments.run(arguments)
        finally:
            sys.stdout.flush()  # here and not as Python exits, where a closed pipe could no longer be caught
    except Refused as refusal:
        print(f"mega-moe: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return PIPE_CLOSED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mega-moe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    version = import_module(__package__).__version__
    parser.add_argument("--version", action="version", version=f"mega-moe {version}")
    parser.set_defaults(run=lambda arguments: _help(parser))
    commands = parser.add_subparsers(metavar="doctor | ladder | bench | schedule | predict | trace | tune")

    doctor_command = commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    doctor_command.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    add = doctor_command.add_argument
    models = [name for name in PRESETS if name != "tiny"]
    add("--ranks", type=int, metavar="W", help="instead: what heaps and pools of W ranks take, a process each")
    add("--shape", help=f"with --ranks: {' | '.join(models)} | T,H,I,E,K, T of each rank (default: {models[0]})")
    add("--precision", choices=PRECISIONS, default="bf16", help="with --ranks: what products read (default: bf16)")
    doctor_command.set_defaults(run=_doctor)

    ladder_command = commands.add_parser("ladder", help="one layer on every rung: parity, launches, time, memory")
    add = ladder_command.add_argument
    add("--shape", help=f"{' | '.join(PRESETS)} | T,H,I,E,K (default: tiny)")
    add("--layer", type=Path, metavar="FILE.safetensors", help="a real layer, as mega_moe.capture_layer writes it")
    add("--stage", action="append", metavar="NAME", help="this rung only; may be repeated (default: all)")
    add("--routing", choices=ROUTINGS, help="how tokens spread over experts (default: balanced)")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16, or the layer's own")
    add("--precision", choices=PRECISIONS, default="bf16", help="what products read (default: bf16, that is --dtype)")
    add("--save", choices=SAVES, default="pre", help="what forward keeps for backward (default: pre)")
    add("--ranks", type=int, metavar="W", help="over the local heaps of W ranks, which share tokens and experts")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    add("--seed", type=int, default=0, help="default: 0")
    add("--json", action="store_true", help="print JSON, as mega_moe.ladder.Climb.as_json describes it")
    add("--plot", type=Path, metavar="FILE.svg", help="draw parity and time; or FILE.png, FILE.pdf")
    add("--force", action="store_true", help="run on a CPU what takes it long")
    ladder_command.set_defaults(run=_ladder)

    bench_command = commands.add_parser("bench", help="the benchmarks, beside what people use today")
    shapes = f"{' | '.join(PRESETS)}; may be repeated (default: both models on a GPU, tiny on a CPU)"
    bench_command.add_argument("--shape", action="append", metavar="NAME", help=shapes)
    bench_command.add_argument(
        "--save", choices=SAVES, default="pre", help="what a rung's forward keeps for its backward (default: pre)"
    )
    bench_command.add_argument(
        "--json", type=Path, metavar="FILE.json", help="where pytest-benchmark writes its results"
    )
    bench_command.add_argument(
        "--floor", action="store_true", help="instead: 1 to 512 tokens, launched one by one and replayed from a graph"
    )
    bench_command.set_defaults(run=_bench)

    schedule_command = commands.add_parser(
        "schedule", help="the order of tiles in one launch, played through and drawn"
    )
    add = schedule_command.add_argument
    add("--shape", default="tiny", help=f"{' | '.join(PRESETS)} | T,H,I,E,K (default: tiny)")
    add("--routing", choices=ROUTINGS, default="balanced", help="how tokens spread over experts (default: balanced)")
    add("--ranks", type=int, default=1, metavar="W", help="share experts and tokens between so many (default: 1)")
    add("--direction", choices=DIRECTIONS, default="forward", help="default: forward")
    add("--save", choices=SAVES, default="pre", help="with inputs, backward makes pre again (default: pre)")
    add("--programs", type=int, metavar="P", help="on each rank (default: as many as run here at once)")
    add("--dtype", choices=[name for name in DTYPES if name != "fp64"], default="bf16", help="default: bf16")
    add("--seed", type=int, default=0, help="default: 0")
    add("--json", action="store_true", help="print JSON, as mega_moe.simulate.Simulation.as_json describes it")
    add("--plot", type=Path, metavar="FILE.svg", help="draw what every program does, and when")
    schedule_command.set_defaults(run=_schedule)

    predict_command = commands.add_parser(
        "predict", help="how long a layer would take over ranks with an H200 each, and what bounds it"
    )
    add = predict_command.add_argument
    models = [name for name in PRESETS if name != "tiny"]
    add("--shape", default=models[0], help=f"{' | '.join(models)} | T,H,I,E,K, T of each rank (default: {models[0]})")
    add("--ranks", type=int, metavar="W", help="so many ranks (default: 1, 2, 4, ... 64)")
    add("--rung", choices=("mega", "ranks"), default="mega", help="default: mega; ranks exchanges in launches apart")
    add("--save", choices=SAVES, default="inputs", help="with inputs, backward makes pre again (default: inputs)")
    add("--precision", choices=PRECISIONS, default="bf16", help="whose bytes are counted (default: bf16)")
    add("--routing", choices=ROUTINGS, default="random", help="how tokens spread over experts (default: random)")
    add("--group", type=int, metavar="EXPERTS", help="of a group in the schedule (default: as the kernels have it)")
    add("--unmixed", action="store_true", help="as if the phases of a turn stood one behind the other")
    add("--dedup", action="store_true", help="as if dispatch fetched a token once a rank, and not once a route")
    add("--domain", type=int, metavar="GPUS", help="joined by NVLink; beyond them is the network (default: 8)")
    add("--seed", type=int, default=0, help="default: 0")
    add("--measured", type=Path, nargs="+", metavar="FILE.json", help="instead: times of one GPU beside predicted ones")
    add("--json", action="store_true", help="print JSON: what was asked, the machine, and each prediction")
    predict_command.set_defaults(run=_predict)

    trace_command = commands.add_parser(
        "trace", help="what every tile of one launch did, and when, drawn and summed up"
    )
    add = trace_command.add_argument
    add("--shape", default="tiny", help=f"{' | '.join(PRESETS)} | T,H,I,E,K (default: tiny)")
    add("--routing", choices=ROUTINGS, default="balanced", help="how tokens spread over experts (default: balanced)")
    add("--direction", choices=DIRECTIONS, default="forward", help="default: forward")
    add("--save", choices=SAVES, default="pre", help="with inputs, backward makes pre again (default: pre)")
    add("--ranks", type=int, metavar="W", help="over the local heaps of W ranks, which share tokens and experts")
    add("--dtype", choices=[name for name in DTYPES if name != "fp64"], default="bf16", help="default: bf16")
    add("--seed", type=int, default=0, help="default: 0")
    add("--json", action="store_true", help="print JSON, as mega_moe.trace.Trace.as_json describes it")
    add("--perfetto", type=Path, metavar="FILE.json", help="write every tile for ui.perfetto.dev")
    add("--plot", type=Path, metavar="FILE.svg", help="draw what every program did, and when")
    add("--force", action="store_true", help="run on a CPU what takes it long")
    trace_command.set_defaults(run=_trace)

    tune_command = commands.add_parser("tune", help="measure the block sizes of the persistent kernels again")
    add = tune_command.add_argument
    shapes = f"{' | '.join(PRESETS)} | T,H,I,E,K; may be repeated (default: both models)"
    add("--shape", action="append", metavar="NAME", help=shapes)
    add("--T", type=int, metavar="TOKENS", help="another number of tokens than the shape's")
    add("--kernel", action="append", metavar="NAME", help="this kernel only; may be repeated (default: all six)")
    add("--quick", action="store_true", help="only tiles that differ from the default in one size")
    add("--write", action="store_true", help="write what was chosen into the package's table, kernels/blocks.json")
    add("--json", type=Path, metavar="FILE.json", help="write the whole table, with what was chosen, to another file")
    tune_command.set_defaults(run=_tune)
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _device(asked: str | None) -> str:
    """The device type to use; for a CPU, also choose one thread and, while Triton is not imported, its interpreter."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise Refused("there is no GPU that this torch can use: leave --device out, or see `mega-moe doctor`")
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    return device


def _doctor(arguments: argparse.Namespace) -> int:
    device = _device(arguments.device)
    if arguments.ranks is None:
        if arguments.shape:
            raise Refused("--shape is for --ranks W: of a layer over ranks doctor says what it takes")
        print(doctor.examination(device))
        return 0
    _require("triton", unless=False)
    shape = arguments.shape or "qwen3-30b-a3b"
    problem = _shape(shape).at(device=device, precision=arguments.precision)
    _check_ranks(arguments.ranks, problem.E)
    if reason := stage("mega").why_not_in(problem.precision, over_ranks=True):
        raise Refused(f"--precision {problem.precision}: {reason}")
    print(doctor.sizes_over_ranks(problem, arguments.ranks, shape))
    return 0


def _ladder(arguments: argparse.Namespace) -> int:
    _require("rich", unless=arguments.json)
    _require("matplotlib", unless=arguments.plot is None)
    _require("safetensors", unless=arguments.layer is None)
    if arguments.plot:
        from .figure import FORMATS

        _check_plot(arguments.plot, FORMATS)
    device = _device(arguments.device)
    rungs = _rungs(arguments.stage)
    try:
        layer = _layer(arguments, rungs, device)
        result = _climb(rungs, layer, quiet=arguments.json)
    except ValueError as error:
        raise Refused(str(error)) from error

    if arguments.json:
        print(json.dumps(result.as_json(), indent=2, allow_nan=False))
    else:
        from . import tables

        tables.show(result, name=str(arguments.layer or arguments.shape or "tiny"))
    if arguments.plot:
        from . import figure

        figure.draw(result, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    return 0 if result.passed else 1


def _climb(rungs: list[Rung], layer: ladder.Layer, quiet: bool) -> ladder.Climb:
    if quiet:
        return ladder.climb(rungs, layer)
    from . import tables

    with tables.progress(ladder.steps_of(rungs, layer.problem)) as doing:
        return ladder.climb(rungs, layer, doing)


def _require(package: str, unless: bool) -> None:
    if not unless and not find_spec(package):
        raise Refused(f"this needs {package}: pip install {package}")


def _check_plot(path: Path, formats: tuple[str, ...], option: str = "--plot") -> None:
    """Before the run, not after it: whether the figure, or another option's file, can be written."""
    if path.suffix.lower() not in formats:
        are = f"formats are {', '.join(formats)}" if len(formats) > 1 else f"format is {formats[0]}"
        raise Refused(f"{option} {path}: the {are}")
    if path.is_dir():
        raise Refused(f"{option} {path}: this is a folder")
    if not path.resolve().parent.is_dir():
        raise Refused(f"{option} {path}: there is no folder {path.parent}")


def _rungs(names: list[str] | None) -> list[Rung]:
    """Those named, each once, or all of them."""
    rungs = {rung.name: rung for rung in LADDER}
    for name in names or []:
        if name not in rungs:
            raise Refused(f"--stage {name}: the stages are {', '.join(rungs)}")
    return [rungs[name] for name in dict.fromkeys(names or rungs)]


def _layer(arguments: argparse.Namespace, rungs: list[Rung], device: str) -> ladder.Layer:
    """The layer to run, random or from a file, if this machine can run it in reasonable time."""
    dtype = DTYPES[arguments.dtype] if arguments.dtype else None
    if arguments.layer is None:
        problem = _shape(arguments.shape or "tiny").at(
            device=device, dtype=dtype or torch.bfloat16, save=arguments.save, precision=arguments.precision
        )
        routing = arguments.routing or "balanced"
        problem, heaps = _over_ranks(problem, arguments.ranks)
        _check_patience(rungs, problem, arguments.force)
        return ladder.Layer(problem, *random_inputs(problem, routing, arguments.seed), routing, heaps)

    for option in ("shape", "routing"):
        if getattr(arguments, option):
            raise Refused(f"--layer brings its own {option}: leave --{option} out")
    try:
        inputs = load_layer(arguments.layer, device)
    except FileNotFoundError as error:
        raise Refused(str(error)) from error
    if dtype:
        inputs = Inputs(
            inputs.x.to(dtype),
            inputs.topk_ids,
            inputs.topk_weights.double() if dtype == torch.float64 else inputs.topk_weights,
            inputs.w_gate_up.to(dtype),
            inputs.w_down.to(dtype),
        )
    problem, heaps = _over_ranks(inputs.problem(save=arguments.save, precision=arguments.precision), arguments.ranks)
    _check_patience(rungs, problem, arguments.force)
    _, dy = random_inputs(problem.at(I=1, E=1, K=1), seed=arguments.seed)
    return ladder.Layer(problem, inputs, dy, "layer", heaps)


def _over_ranks(problem: Problem, W: int | None) -> tuple[Problem, LocalHeaps | None]:
    """The problem as it is; or over the heaps of W ranks, which share its tokens and its experts."""
    if W is None:
        return problem, None
    _check_ranks(W, problem.E)
    tokens_per_rank = shares(problem.T, W)
    heaps = LocalHeaps(W, max(*tokens_per_rank, 1))
    return problem.at(heap=heaps.key, tokens_per_rank=tokens_per_rank), heaps


def _check_ranks(W: int, E: int) -> None:
    if W < 1 or E % W:
        raise Refused(f"--ranks {W}: the ranks share {E} experts evenly, so give a divisor of {E}")


def _shape(text: str) -> Problem:
    if text in PRESETS:
        return PRESETS[text]
    try:
        T, H, I, E, K = (int(size) for size in text.split(","))
    except ValueError:
        raise Refused(f"--shape {text}: give {', '.join(PRESETS)}, or five sizes T,H,I,E,K") from None
    if min(H, I, E, K) < 1 or T < 0:
        raise Refused(f"--shape {text}: H, I, E and K must be at least 1, and T at least 0")
    return Problem(T, H, I, E, K)


def _check_patience(rungs: list[Rung], problem: Problem, force: bool) -> None:
    if problem.device != "cpu" or force:
        return
    running = [rung for rung in rungs if not rung.why_not(problem)]
    _refuse_hours(ladder.cpu_seconds(running, problem), "Triton's interpreter and float64")


def _refuse_hours(seconds: float, because_of: str) -> None:
    if seconds > PATIENCE:
        about = f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
        raise Refused(
            f"on a CPU this layer takes about {about} ({because_of}): choose a smaller --shape, run it on a GPU, or "
            "insist with --force"
        )


def _bench(arguments: argparse.Namespace) -> int:
    device, shapes = _device(None), arguments.shape or []
    for name in shapes:
        if name not in PRESETS:
            raise Refused(f"--shape {name}: the shapes are {', '.join(PRESETS)}")
        if device == "cpu" and name != "tiny":
            raise Refused(f"--shape {name} needs a GPU: on a CPU only tiny is run, to try the machinery")
    if arguments.json:
        _check_plot(arguments.json, (".json",), "--json")
    if reason := bench.why_not():
        raise Refused(reason)
    return bench.run(shapes, arguments.save, arguments.json, arguments.floor)


def _schedule(arguments: argparse.Namespace) -> int:
    problem, W = _shape(arguments.shape).at(dtype=DTYPES[arguments.dtype], save=arguments.save), arguments.ranks
    _check_ranks(W, problem.E)
    if arguments.programs is not None and arguments.programs < 1:
        raise Refused(f"--programs {arguments.programs}: at least 1 has to run")
    if arguments.plot:
        _check_plot(arguments.plot, (".svg",))
    problem = problem.at(device=_device(None))
    if reason := stage("persistent").why_not(problem):
        raise Refused(reason)
    simulation = _simulation(problem, W, arguments)

    if arguments.json:
        print(json.dumps(simulation.as_json()))
    else:
        sizes = "  ".join(f"{letter}={simulation.problem[letter]}" for letter in "THIEKW")
        print(f"{arguments.shape}  {sizes}  {arguments.dtype}  routing: {arguments.routing}  {arguments.direction}\n")
        print(simulation.as_text())
    if arguments.plot:
        arguments.plot.write_text(simulation.as_svg())
        print(f"wrote {arguments.plot}", file=sys.stderr)
    return 0


def _simulation(problem: Problem, W: int, arguments: argparse.Namespace) -> simulate.Simulation:
    """The layer's schedule, played through with this machine's block sizes."""
    from .kernels import blocks
    from .kernels.schedule import backward_work, forward_work

    tokens_of_rank = shares(problem.T, W)
    tiles, p = blocks.mega_for(problem), problem.at(tokens_per_rank=tokens_of_rank if W > 1 else ())
    if arguments.direction == "forward":
        work = forward_work(p, tiles)
    else:
        work = backward_work(p, tiles, Need(), recompute=p.save == "inputs")
    inputs, _ = random_inputs(p.at(I=1), arguments.routing, arguments.seed)  # the same ids without the weights' memory
    rows = plan(inputs.topk_ids.cpu(), p.E)
    homes = home_of_row(rows, tokens_of_rank)
    table = schedule(rows.row_start, tokens_of_rank, homes.bincount(minlength=W).tolist(), work).tolist()

    programs = arguments.programs or blocks.programs(tiles.gate_up)
    draws = simulate.by_ticket(table, W, programs)
    spans = simulate.play(table, work, p.E, W, homes.tolist(), draws, simulate.steps_of(table, work, p, tiles))
    facts = {letter: getattr(p, letter) for letter in "THIEK"} | {"W": W, "dtype": arguments.dtype}
    facts |= {"routing": arguments.routing, "seed": arguments.seed, "save": p.save}
    return simulate.Simulation(facts, arguments.direction, work, table, programs, spans)


def _predict(arguments: argparse.Namespace) -> int:
    _device("cpu")  # nothing here runs on a GPU
    from . import predict  # which needs Triton

    if arguments.measured:
        try:
            those = [one for path in arguments.measured for one in predict.measured(path)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"--measured: {error}") from error
        print("\n".join(predict.beside(those)))
        return 0
    shape = arguments.shape
    problem = _shape(shape).at(save=arguments.save, precision=arguments.precision, device="cpu")
    if problem.T < 1:
        raise Refused(f"--shape {shape}: T must be at least 1")
    for name in ("group", "domain"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise Refused(f"--{name} {number}: at least 1")
    if arguments.ranks is not None:
        _check_ranks(arguments.ranks, problem.E)
    machine = predict.H200.at(domain=arguments.domain) if arguments.domain else predict.H200
    names = ("rung", "routing", "seed", "group", "dedup")
    facts = {name: getattr(arguments, name) for name in names} | {"mixed": not arguments.unmixed}
    numbers = [arguments.ranks] if arguments.ranks else predict.numbers_of_ranks(problem.E)
    predicted = lambda W, direction: predict.over_links(problem, W, direction, machine=machine, **facts)
    try:
        predictions = {W: [predicted(W, direction) for direction in DIRECTIONS] for W in numbers}
    except ValueError as error:
        raise Refused(f"--precision {problem.precision}: {error}") from error
    if arguments.json:
        asked = {letter: getattr(problem, letter) for letter in "THIEK"}
        asked |= {"save": problem.save, "precision": problem.precision} | facts
        each = [{"W": W} | one.as_json() for W, several in predictions.items() for one in several]
        print(json.dumps({"problem": asked, "machine": asdict(machine), "predictions": each}))
        return 0
    sizes = "  ".join(f"{letter}={getattr(problem, letter)}" for letter in "THIEK")
    precision = "" if problem.precision == "bf16" else f"  precision: {problem.precision}, products as long as bf16's"
    print(
        f"{shape}  {sizes}  T of each rank  routing: {arguments.routing}  save: {problem.save}  rung: {arguments.rung}"
        f"{precision}"
    )
    print(f"{machine.name}\n")
    print("\n".join(predict.in_lines(predictions, shape)))
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        _check_plot(arguments.plot, (".svg",))
    if arguments.perfetto:
        _check_plot(arguments.perfetto, (".json",), "--perfetto")
    problem = _shape(arguments.shape).at(dtype=DTYPES[arguments.dtype], save=arguments.save)
    problem, heaps = _over_ranks(problem.at(device=_device(None)), arguments.ranks)
    if reason := stage("mega").why_not(problem):
        raise Refused(reason)

    from . import trace  # which needs Triton

    if reason := trace.why_not(problem):
        raise Refused(reason)
    if problem.device == "cpu" and not arguments.force:
        _refuse_hours(trace.seconds(problem), "Triton's interpreter")
    inputs, dy = random_inputs(problem, arguments.routing, arguments.seed)
    layer = ladder.Layer(problem, inputs, dy, arguments.routing, heaps)
    traced = trace.trace(layer, arguments.direction)

    if arguments.json:
        print(json.dumps(traced.as_json(), indent=2))
    else:
        sizes = "  ".join(f"{letter}={traced.problem[letter]}" for letter in "THIEKW")
        print(f"{arguments.shape}  {sizes}  {arguments.dtype}  routing: {arguments.routing}  {arguments.direction}")
        print(f"{traced.machine['device']}\n")
        print(traced.as_text())
    if arguments.perfetto:
        arguments.perfetto.write_text(json.dumps(traced.as_perfetto()))
        print(f"wrote {arguments.perfetto}; open it in https://ui.perfetto.dev", file=sys.stderr)
    if arguments.plot:
        arguments.plot.write_text(traced.as_svg())
        print(f"wrote {arguments.plot}", file=sys.stderr)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    _require("rich", unless=False)
    if _device(None) == "cpu":
        raise Refused("tune needs a GPU: what an interpreter takes says nothing about block sizes")
    shapes = arguments.shape or ["qwen3-30b-a3b", "qwen3-235b-a22b"]
    problems = {name: _shape(name) for name in shapes}
    if arguments.T is not None:
        problems = {name: problem.at(T=arguments.T) for name, problem in problems.items()}
    for name, problem in problems.items():
        if problem.T < 1:
            raise Refused(f"--shape {name}: without tokens there is nothing to measure")
        if reason := stage("persistent").why_not(problem):
            raise Refused(reason)

    from . import tables, tune
    from .kernels import blocks

    for name, problem in problems.items():
        if blocks.few_for(problem):
            least = blocks.blocks_for(problem.dtype).few[-1].rows * problem.E // problem.K + 1
            raise Refused(f"--shape {name}: so few rows have tiles of their own: give --T {least} or more")
    kernels = list(dict.fromkeys(arguments.kernel or tune.KERNELS))
    for kernel in kernels:
        if kernel not in tune.KERNELS:
            raise Refused(f"--kernel {kernel}: the kernels are {', '.join(tune.KERNELS)}")
    paths = [*[blocks.TABLE] * arguments.write, *[arguments.json] * bool(arguments.json)]
    for path in paths:
        _check_table(path)
    if paths and len(kernels) < len(tune.KERNELS):
        missing = [name for name, p in problems.items() if not tune.has_entry(blocks.table(), p, blocks.target())]
        if missing:
            raise Refused(f"the table has no tiles for {missing[0]} yet: measure all kernels first, without --kernel")

    wanted = {problem: tune.candidates(problem, kernels, arguments.quick) for problem in problems.values()}
    with tables.progress(tune.jobs_of(wanted)) as doing:
        failures = tune.compile_beforehand(wanted, doing)
    entries, passed = blocks.table(), True
    for name, problem in problems.items():
        with tables.progress(tune.steps_of(wanted[problem], problem.device)) as doing:
            tuning = tune.measure(problem, wanted[problem], failures, doing)
        tables.show_tiles(tuning, name)
        passed &= tuning.passed
        entries = tune.with_entry(entries, tuning.entry())
        for path in paths:  # after each layer: what is measured is not lost with the next one
            path.write_text(tune.as_json(entries))
    for path in paths:
        print(f"wrote {path}", file=sys.stderr)
    return 0 if passed else 1


def _check_table(path: Path) -> None:
    """Before the run, not after it: whether the table can be written."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise Refused(f"{path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise Refused(f"{path} cannot be written: choose another file with --json")
