"""The command ``trainbus``, with one module per command or group of commands.

A command is a function: its parameters are the arguments and options, its docstring is the help, and it returns the exit
status, or None for 0. Only these modules import ``hooks``, and only when a command needs it.

A module is imported for its command, for help and for completion, so none of them imports torch at its top: that takes
seconds. What needs torch is imported where the command does it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError, UnusedCliTokensError
from rich.console import Console
from rich.text import Text

from trainbus.config.read import SUFFIXES, shortened
from trainbus.eventloop.errors import CheckpointDamagedError, TrainbusError
from trainbus.eventloop.terminal import cell
from trainbus.eventloop.user_errors import notes_of

_TOO_LONG: Final = re.compile(r"[^\s/]{256,}")  # for a name in any file system

app = App(
    name="trainbus",
    help="An async event-bus runtime for PyTorch training.",
    version=lambda: f"trainbus {_version()}",
    version_format="plaintext",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
)
app.command("trainbus.cli.run:demo", name="demo")
app.command("trainbus.cli.run:run", name="run")
app.command("trainbus.cli.init:init", name="init")
app.command("trainbus.cli.runs:list_runs", name="runs")
app.command("trainbus.cli.report:report", name="report")
app.command("trainbus.cli.dashboard:dashboard", name="dashboard")
app.command("trainbus.cli.catalogue:list_hooks", name="hooks")
app.command("trainbus.cli.catalogue:list_events", name="events")
traces = App(name="trace", help="Merge traces of TraceHook and of torch's profiler.")
traces.command("trainbus.cli.trace:merge_files", name="merge")
app.command(traces)
app.command("trainbus.cli.doctor:doctor", name="doctor")
app.command("trainbus.cli.migrate:migrate", name="migrate")
configurations = App(name="config", help="Say what a configuration may contain.")
configurations.command("trainbus.cli.configuration:schema", name="schema")
app.command(configurations)
files = App(
    name="checkpoint",
    help="List, verify, show, export and import checkpoints.",
    help_epilogue="Exit status: 0 for success, 1 for a damaged file or a failed write, 2 for a usage error.",
)
files.command("trainbus.cli.checkpoint.listing:ls", name="ls")
files.command("trainbus.cli.checkpoint.listing:verify_all", name="verify")
files.command("trainbus.cli.checkpoint.show:show", name="show")
files.command("trainbus.cli.checkpoint.exchange:export", name="export")
files.command("trainbus.cli.checkpoint.exchange:import_", name="import")
app.command(files)
app.register_install_completion_command(add_to_startup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, 1 for a damaged file, 2 for a usage error, 130 after Ctrl-C.

    A preempted run raises :class:`trainbus.eventloop.RunPreempted`, by which the process exits with 75.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for arrows and rules, which the terminal's encoding may lack
    given = sys.argv[1:] if arguments is None else arguments
    words = _with_auto([_expanded(word) for word in given])
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
        from trainbus.observe import RunDamagedError

        is_damage = isinstance(error, CheckpointDamagedError | RunDamagedError | OSError) or isinstance(
            error.__cause__, OSError
        )
        message = str(error)
        if isinstance(error, OSError) and not isinstance(error, TrainbusError) and error.filename is not None:
            message = f"{shortened(str(error.filename))}: {error.strerror}"
        message = _TOO_LONG.sub(lambda name: shortened(name[0]), message)
        return _fail(1 if is_damage else 2, command, message, error)
    except KeyboardInterrupt as interrupt:
        return _fail(130, command, "interrupted", interrupt)


def _expanded(word: str) -> str:
    """Return an argument with ``~`` replaced in ``--out=~/x``: a shell expands it in ``--out ~/x`` only."""
    option, equals, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("-") else word  # noqa: PTH111


def _with_auto(words: list[str]) -> list[str]:
    """Insert a value after a ``--resume`` or ``--dashboard`` of ``run`` that has none."""
    if words[:1] != ["run"]:
        return words
    for option, value, is_value in (("--resume", "newest", _is_run), ("--dashboard", "auto", str.isdecimal)):
        end = words.index(option) + 1 if option in words else 0
        if end and not (end < len(words) and is_value(words[end])):
            words = [*words[:end], value, *words[end:]]
    return words


def _is_run(word: str) -> bool:
    """Return True for a word that can name a run, and is neither a change nor a configuration."""
    is_change = "=" in word and "/" not in word.partition("=")[0]
    return not (word.startswith("-") or is_change or Path(word).suffix.lower() in SUFFIXES)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("trainbus")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


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
    rank = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process
        from trainbus.eventloop.training.distributed.ranks import record_failure

        record_failure(error)
        rank = f" (rank {os.environ['RANK']})"
    lines = "\n".join([message, *notes_of(error)])
    # One write, so that the lines of several ranks do not mix.
    text = Text.assemble((f"{command}{rank}:", "bold red"), " ", cell(lines, keep="\n"))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
    return status
