"""``trainbus run``: train what a configuration describes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eventloop.cli.arguments import Subparsers
from eventloop.cli.folders import free, resumable, to_resume
from eventloop.config import find_files_in, override, read
from eventloop.training.loop import TrainLoop
from eventloop.training.setup import Setup

_MORE = """\
CHANGE is place=value, such as loop.max_epochs=3, model.width=64, custom_hooks[0].interval=5 or
default_hooks.checkpoint=false; the value gets its type from the option it is for. Modules that the configuration
imports are looked for among the installed ones, beside the configuration, and in the current folder.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help="train what a configuration file describes", epilog=_MORE)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a .toml, .yaml or .json file")
    parser.add_argument("changes", nargs="*", default=[], metavar="CHANGE", help="changes to the configuration (below)")
    parser.add_argument("--dry-run", action="store_true", help="make everything, show the hook table, and do not train")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in loop.work_dir (default: the newest run)"
    )
    parser.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from hooks.defaults import DEFAULT_HOOKS

    console = Console()
    config = override(read(options.config), options.changes)
    folders = find_files_in(options.config.parent, Path.cwd())
    setup = Setup(config, default_hooks=DEFAULT_HOOKS, folders=folders)
    work_dir = _work_dir(setup.loop, options)
    setup.loop["work_dir"] = work_dir
    loop = setup.make()
    console.print(f"[bold]trainbus run[/] {options.config} → {work_dir}", highlight=False)
    if options.dry_run:
        console.print(loop.bus.describe())
        console.print("not trained (--dry-run)", style="dim")
        return 0
    with resumable(work_dir, f"--resume loop.work_dir={work_dir}"):
        _train(loop, work_dir, console, resume=options.resume, test=setup.tests)
    return 0


def _work_dir(loop: dict[str, Any], options: argparse.Namespace) -> Path:
    chosen = loop.get("work_dir")
    default = Path("runs") / options.config.stem
    if options.resume:
        return to_resume(None if chosen is None else Path(chosen), default)
    return free(default if chosen is None else Path(chosen))


def _train(loop: TrainLoop, work_dir: Path, console: Console, *, resume: bool, test: bool) -> None:
    began = time.perf_counter()
    results = {"last validation": loop.run(resume="auto" if resume else None)}
    seconds = time.perf_counter() - began
    if test:
        results["test"] = loop.test()
    table = Table.grid(padding=(0, 2))
    for name, metrics in results.items():
        if metrics:
            table.add_row(name, ", ".join(f"{metric} {_shown(value)}" for metric, value in metrics.items()))
    table.add_row("trained", f"{loop.counters.iter} iterations in all, {seconds:.1f} s in this session")
    table.add_row("files in", str(work_dir))
    console.print()
    console.print(table)


def _shown(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
