"""The command ``trainbus``, with one module per command or group of commands.

A command is a function: its parameters are the arguments and options, its docstring is the help, and it returns the exit
status, or None for 0. Only these modules import ``hooks``, and only when a command needs it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError, UnusedCliTokensError
from rich.console import Console
from rich.text import Text
from torch.distributed import is_torchelastic_launched

from trainbus.cli import catalogue, configuration, dashboard, doctor, init, migrate, report, run, runs, trace
from trainbus.cli.checkpoint import exchange, listing, show
from trainbus.config.read import shortened
from trainbus.eventloop.errors import CheckpointDamagedError, TrainbusError
from trainbus.eventloop.terminal import cell
from trainbus.eventloop.training.distributed.ranks import record_failure
from trainbus.eventloop.user_errors import notes_of
from trainbus.observe import RunDamagedError
from trainbus.observe.environment import versions

app = App(
    name="trainbus",
    help="An async event-bus runtime for PyTorch training.",
    version=lambda: f"trainbus {versions().get('trainbus', '0+unknown')}",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
)
app.command(run.demo)
app.command(run.run)
app.command(init.init)
app.command(runs.list_runs, name="runs")
app.command(report.report)
app.command(dashboard.dashboard)
app.command(catalogue.list_hooks, name="hooks")
app.command(catalogue.list_events, name="events")
traces = App(name="trace", help="Merge traces of TraceHook and of torch's profiler.")
traces.command(trace.merge_files, name="merge")
app.command(traces)
app.command(doctor.doctor)
app.command(migrate.migrate)
configurations = App(name="config", help="Say what a configuration may contain.")
configurations.command(configuration.schema)
app.command(configurations)
files = App(
    name="checkpoint",
    help="List, verify, show, export and import checkpoints.",
    help_epilogue="Exit status: 0 for success, 1 for a damaged file or a failed write, 2 for a usage error.",
)
files.command(listing.ls)
files.command(listing.verify_all, name="verify")
files.command(show.show)
files.command(exchange.export)
files.command(exchange.import_, name="import")
app.command(files)
app.register_install_completion_command(add_to_startup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 1 for a damaged file, 2 for a usage error, 130 after Ctrl-C.

    A preempted run raises :class:`trainbus.eventloop.RunPreempted`, by which the process exits with 75.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for arrows and rules, which the terminal's encoding may lack
    given = sys.argv[1:] if arguments is None else arguments
    words = run.with_auto([_expanded(word) for word in given])
    names, groups, rest = app.parse_commands(words)
    if not rest and groups[-1].default_command is None:
        app.help_print(words, console=Console(stderr=True))
        return 2
    command = " ".join(("trainbus", *names))
    try:
        return app(words) or 0
    except CycloptsError as error:
        return _fail(2, command, f"{_mistake(error, names)}\n{command} --help shows the options", error)
    except (TrainbusError, OSError) as error:
        if isinstance(error, OSError) and tuple(names[:1]) in (("run",), ("demo",)):
            raise  # an error of the user's code
        is_damage = isinstance(error, CheckpointDamagedError | RunDamagedError | OSError) or isinstance(
            error.__cause__, OSError
        )
        message = str(error)
        if isinstance(error, OSError) and not isinstance(error, TrainbusError) and error.filename is not None:
            message = f"{shortened(str(error.filename))}: {error.strerror}"
        return _fail(1 if is_damage else 2, command, message, error)
    except KeyboardInterrupt as interrupt:
        return _fail(130, command, "interrupted", interrupt)


def _expanded(word: str) -> str:
    """Return an argument with ``~`` replaced in ``--out=~/x``: a shell expands it in ``--out ~/x`` only."""
    option, equals, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("-") else word  # noqa: PTH111


def _mistake(error: CycloptsError, names: Sequence[str]) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"unexpected argument {shortened(repr(error.unused_tokens[0]))}"
    if isinstance(error, MissingArgumentError) and error.argument is not None and not error.argument.name.startswith("-"):
        return f"the argument {error.argument.name} is missing"
    text = shortened(str(error), 200)
    if isinstance(error, UnknownOptionError) and tuple(names) == ("run",) and "Did you mean" not in text:
        text += " Change the configuration by key=value, such as loop.max_epochs=3"
    return text


def _fail(status: int, command: str, message: str, error: BaseException) -> int:
    record_failure(error)
    rank = f" (rank {os.environ['RANK']})" if is_torchelastic_launched() else ""
    lines = "\n".join([message, *notes_of(error)])
    # One write, so that the lines of several ranks do not mix.
    text = Text.assemble((f"{command}{rank}:", "bold red"), " ", cell(lines, keep="\n"))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
    return status
