"""``trainbus run`` and ``trainbus demo``: train in a new folder, or in the folder of a run to resume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainbus.cli.common import RUNS, Positive, Seed, check_checkpoint, write_json
from trainbus.cli.sweep import sweep, trainings
from trainbus.config import override, read
from trainbus.config.read import all_parsed, shortened
from trainbus.eventloop.checkpoint import as_path
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.terminal import cell
from trainbus.eventloop.training.saves.discover import is_candidate
from trainbus.eventloop.training.schema import LAST
from trainbus.eventloop.user_errors import add_note, contextmanager
from trainbus.observe import is_run

if TYPE_CHECKING:
    from trainbus.eventloop.training import TrainLoop


def run(
    config: Path,
    /,
    *changes: Annotated[str, Parameter(name="CHANGE")],
    check: bool = False,
    costs: bool = False,
    dashboard: Annotated[str | None, Parameter(metavar="[PORT]")] = None,
    dry_run: bool = False,
    json: bool = False,
    parallel: Annotated[Positive | None, Parameter(alias="-n")] = None,
    print_config: bool = False,
    resume: Annotated[str | None, Parameter(metavar="[RUN]")] = None,
    trace: bool = False,
) -> int | None:
    """Train from a configuration file.

    CHANGE is key=value, such as loop.max_epochs=3, model.width=64, custom_hooks[0].interval=5 or
    default_hooks.checkpoint=false. The option determines the type of the value. Modules under imports are searched for
    among the installed ones, beside the configuration, and in the current folder.

    A configuration is a program: it imports modules and calls functions in them, with your rights. Run only
    configurations that you trust, as with scripts.

    Several values (optimizer.lr=0.1,0.01) are several trainings, of all products: a process and a folder each, and a table of
    all at the end. Commas in brackets belong to a value; a text with a comma belongs in the file.

    Several processes: torchrun --nproc-per-node N -m trainbus run CONFIG

    Args:
        config: a .toml, .yaml or .json file.
        changes: values to override, as key=value; see above.
        check: try the training on copies instead: two batches of training and validation with all hooks, a save and a resume.
            Prints what it found, the metrics, and estimates of time and size. It leaves no files. Exit status 1: an error.
        costs: at the end, print where the time went: data, step, each hook, checkpoints.
        dashboard: serve a page with live curves, costs and buttons that control the run, on this machine only. Its address
            is printed. Without a port: 8000, or any if that is taken.
        dry_run: create all objects and print the table of hooks, without training.
        json: with --check, print the result as JSON.
        parallel: how many trainings of several values run at the same time; by default one. All use the same accelerators.
        print_config: print the configuration with the changes and all defaults, as JSON, and do nothing else. A run of what
            is printed is the same run.
        resume: resume a run. Without a value (or with newest): the newest run of this configuration, or of
            loop.work_dir. With auto: the same, also from where its hooks save, or a new run if there is none. With a
            folder: the run in it. With a checkpoint file or URL: from it, in a new folder.
        trace: write trace.json with 50 iterations after the first 100, to open in https://ui.perfetto.dev. For other
            iterations, add TraceHook(first=..., iterations=...) to custom_hooks.
    """
    several = trainings(changes)
    if len(several) > 1:
        if check or dashboard is not None or dry_run or print_config:
            way_out = "give each option one value with them"
            raise ConfigurationError(f"--check, --dashboard, --dry-run and --print-config go with one training: {way_out}")
        options = [name for name, given in (("--costs", costs), ("--trace", trace)) if given]
        options += ["--resume", "auto"] if resume else []
        changed = all_parsed(override(read(config), several[0].changes))
        folder = _folder_of_several(changed, config, resume)
        return sweep(config, several, folder, options, parallel or 1)
    if parallel is not None:
        raise ConfigurationError(f"-n {parallel} needs an option with several values, such as optimizer.lr=0.1,0.01")
    if (check and (resume is not None or dry_run)) or (json and not check):
        raise ConfigurationError("--check goes without --resume and --dry-run, and --json with --check only")
    from trainbus.config import Setup
    from trainbus.config.defaults import default_hooks
    from trainbus.eventloop.training.distributed.launch import from_ranks, process_group
    from trainbus.eventloop.world import this_rank

    folders = config.parent, Path.cwd()
    given = override(read(config), changes)
    parsed = all_parsed(given)
    defaults = default_hooks(loop if isinstance(loop := parsed.get("loop"), dict) else {})
    setup = Setup(given, default_hooks=defaults, folders=folders)
    if print_config:
        from trainbus.config.schema import with_defaults

        write_json(with_defaults(parsed, defaults))
        return None
    with process_group():
        console = Console(quiet=this_rank() > 0)
        # The highest number, because a rank may have a disk of its own with a run that the others do not see.
        choices = from_ranks(partial(_work_dir, setup.loop, config, resume))
        work_dir, resume = max(choices, key=lambda one: (len(str(one[0])), str(one[0])))
        setup.loop["work_dir"] = work_dir
        loop = setup.make()
        if check:
            return _check(loop, as_json=json)
        if costs:
            loop.bus.timing = True
        if trace:
            _add_trace(loop)
        if dashboard is not None:
            _add_dashboard(loop, dashboard)
        console.print(Text.assemble(("trainbus run", "bold"), cell(f" {config} → {work_dir}")))
        if dry_run:
            console.print(loop.bus.describe())
            console.print("not trained (--dry-run); --check tries the training", style="dim", highlight=False)
            return None
        with _resumable(work_dir, f"--resume {work_dir}"):
            try:
                _train(loop, work_dir, console, resume=resume, test=setup.tests)
            finally:  # also of a run that failed or was interrupted
                if costs:
                    console.print("", loop.bus.costs())
                from trainbus.observe import last_lines

                console.print("", last_lines(work_dir, loop.bus))
            if is_run(work_dir):
                console.print(cell(f"\nnext: trainbus report {work_dir}", keep="\n"), soft_wrap=True)
    return None


def _folder_of_several(config: dict[str, Any], path: Path, resume: str | None) -> Path:
    """Return the folder for the trainings of several values: a new one, or the newest one to resume."""
    loop = config.get("loop")
    chosen = loop.get("work_dir") if isinstance(loop, dict) else None
    base = RUNS / path.stem if chosen is None else Path(str(chosen)).expanduser()
    if resume not in (None, "auto", "newest"):
        if not Path(resume).is_dir():
            raise ConfigurationError(f"--resume {resume}: no such folder; give the folder of trainings with several values")
        return Path(resume)
    numbered = (base.with_name(f"{base.name}-{number}") for number in count(2))
    there = [*takewhile(Path.exists, chain([base], numbered))]
    if resume is None or not there:
        if resume == "newest":
            raise ConfigurationError(f"--resume found no {base}; leave out --resume to begin")
        return base.with_name(f"{base.name}-{len(there) + 1}") if there else base
    return there[-1]


def _check(loop: TrainLoop, *, as_json: bool) -> int:
    result = loop.check()
    if as_json:
        write_json(msgspec.to_builtins(result))
    else:
        Console(highlight=False).print(result)
    return 0 if result.ok else 1


def demo(*, out: Path | None = None, epochs: Positive = 20, seed: Seed = 0, resume: bool = False, hooks: bool = False) -> int:
    """Train a small network on handwritten digits, with many hooks.

    Args:
        out: folder for the files; by default a new one: runs/digits, runs/digits-2 …
        epochs: total number of epochs.
        seed: seed of weights, shuffling and split.
        resume: resume from the last checkpoint in --out, or in the newest run.
        hooks: also print the table of hooks, with what each did.
    """
    from trainbus.demo import run_demo
    from trainbus.eventloop.training.folders import free_folder, newest_run

    default = RUNS / "digits"
    work_dir = _with_checkpoint(out or newest_run(default)) if resume else free_folder(out or default)
    with _resumable(work_dir, f"--resume --out {work_dir}"):
        return run_demo(work_dir, epochs=epochs, seed=seed, resume=resume, table=hooks)


def _add_trace(loop: TrainLoop) -> None:
    from trainbus.observe import TraceHook

    if not any(isinstance(hook, TraceHook) for hook in loop.bus.hooks):
        loop.bus.add(TraceHook())


def _add_dashboard(loop: TrainLoop, port: str) -> None:
    from trainbus.observe import Dashboard

    if port != "auto" and not (port.isdecimal() and int(port) < 65536):
        raise ConfigurationError(f"--dashboard={shortened(port)}: give a port from 1 to 65535, 0 for any, or no value")
    loop.bus.add(Dashboard(None if port == "auto" else int(port)))


def _train(loop: TrainLoop, work_dir: Path, console: Console, *, resume: str | None, test: bool) -> None:
    began = time.perf_counter()
    results = {"last validation": loop.run(resume=resume)}
    seconds = time.perf_counter() - began
    if test:
        results["test"] = loop.test()
    table = Table.grid(padding=(0, 2))
    for name, metrics in results.items():
        if metrics:
            table.add_row(name, cell(", ".join(f"{metric} {_shown(value)}" for metric, value in metrics.items())))
    table.add_row("trained", f"{loop.counters.iter} iterations in all, {seconds:.1f} s in this session")
    table.add_row("files in", cell(str(work_dir)))
    console.print()
    console.print(table)


def _shown(value: Any) -> str:
    with suppress(TypeError, ValueError):
        return f"{float(value):.4g}"
    return str(value)


def _work_dir(loop: dict[str, Any], config: Path, resume: str | None) -> tuple[Path, str | None]:
    """Return the folder of the run, and the value for the loop's ``resume``."""
    from trainbus.eventloop.training.folders import free_folder, newest_run

    chosen, default = loop.get("work_dir"), RUNS / config.stem
    if resume in ("auto", "newest"):
        found = newest_run(default if chosen is None else Path(chosen).expanduser())
        return (found, resume) if resume == "auto" else (_with_checkpoint(found), str(found))
    if resume is not None:
        path = as_path(resume)
        if isinstance(path, Path) and path.is_dir():
            return _with_checkpoint(path), str(path)
        if not path.is_dir():
            if not path.exists():
                way_out = f"without a value, --resume resumes the newest run in {RUNS}/"
                raise ConfigurationError(f"--resume {path}: no such file or folder; {way_out}")
            check_checkpoint(path)
    return free_folder(default if chosen is None else Path(chosen).expanduser()), resume


def _with_checkpoint(run: Path) -> Path:
    """Return the folder of a run to resume; raise ConfigurationError if it has no checkpoint."""
    if not any(is_candidate(path) or path.name == LAST for path in run.glob("*")):
        raise ConfigurationError(f"--resume found no {LAST} in {run}; leave out --resume to begin a new run")
    return run


@contextmanager
def _resumable(work_dir: Path, arguments: str) -> Iterator[None]:
    """Create the folder of a run, and let the run log, at an early end, that the ``arguments`` resume it."""
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{work_dir}: cannot create this folder: {error.strerror}") from None
    from trainbus.eventloop.training.saves.restore import resumed_with

    with resumed_with(arguments):
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if not (work_dir / "last_checkpoint").exists():
                add_note(interrupt, "no checkpoint was written yet")
            raise
