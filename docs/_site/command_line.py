"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import re

from eventloop.cli import app

INTRODUCTION = """\
# Command line

What `trainbus --help` says, for every command.

Exit status: 0; 1 for a damaged file; 2 for a mistake in the call; 130 after Ctrl-C. `python -m trainbus` is the same command, and
`torchrun -m trainbus run` the way into several processes.

"""


def page() -> str:
    """Return the page."""
    text: str = app.generate_docs(output_format="markdown", heading_level=1)
    _, _, commands = text.partition("\n## trainbus ")
    commands = re.sub(r"^    (?=\S)", "    ", f"## trainbus {commands}", flags=re.MULTILINE)
    return INTRODUCTION + commands.replace("```console", "```text")
