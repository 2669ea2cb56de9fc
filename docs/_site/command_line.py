"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import re

from trainbus.cli import app

INTRODUCTION = """\
# Command line

Every command with its arguments and options. `trainbus COMMAND --help` prints the same; `trainbus --version` prints the version.

Exit status: 0 for success, 1 for a damaged file, 2 for a usage error, 75 for a run that a `PreemptionHook` ended, 130 after
Ctrl-C. `python -m trainbus` is the same command, and `torchrun -m trainbus run` starts it in several processes.

"""
_ARGUMENT = re.compile(r"^\* `([A-Z]+)`", re.MULTILINE)


def page() -> str:
    """Return the page."""
    text: str = app.generate_docs(output_format="markdown", heading_level=1)
    _, *sections = re.split(r"\n(?=##+ trainbus )", text)
    return INTRODUCTION + "\n".join(map(_section, sections))


def _section(text: str) -> str:
    """Return the text of one command, its usage with the names of its arguments."""
    text = text.replace("```console", "```text")
    unnamed = [name for name in _ARGUMENT.findall(text) if name not in text.partition("\n\n")[2].partition("\n\n")[0]]
    return text.replace("[ARGS", f"[{unnamed[0]}", 1) if unnamed else text
