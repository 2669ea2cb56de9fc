"""The blocks of code in README and in the pages of ``docs/``, and what the comments before them say of them.

A comment stands alone on the line before a block:

- ``<!-- shown: REASON -->``: the block is not run. Python must still parse.
- ``<!-- needs: mmengine, wandb -->``: the block is run where these libraries are installed.
- ``<!-- raises: ConfigurationError -->``: the block ends with this error.
- ``<!-- slow -->``: the block is run by ``.ci/run`` only.
- ``<!-- once: REASON -->``: a process can run the block once only.
- ``<!-- file: examples/ppo.py -->``: ``.ci/write_shown_files.py`` writes this file into the block.

A block with a file name as its title (``title="name.py"``) is a file in the folder of the page's blocks. It is not run
by itself.
"""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>```+)(?P<info>[^`\n]*)$")
_MARK = re.compile(r"^\s*<!-- (shown|needs|raises|slow|once|file)(?:: (.*?))? -->$")


class Block(NamedTuple):
    """A block of code on a page; ``line`` is that of its first line of code, from 1."""

    page: str
    line: int
    language: str
    title: str
    code: str
    marks: dict[str, str]


def pages() -> list[str]:
    """Return README and the pages of the site, relative to the repository."""
    found = (path for path in DOCS.rglob("*.md") if "_site" not in path.parts)
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in found)]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found, number, marks = [], 0, dict[str, str]()
    while number < len(lines):
        line = lines[number]
        number += 1
        if mark := _MARK.match(line):
            marks[mark[1]] = mark[2] or ""
            continue
        fence = _FENCE.match(line)
        if fence is None:
            if line.strip():
                marks = {}
            continue
        first = number
        while lines[number].strip() != fence["fence"]:
            number += 1
        code = textwrap.dedent("\n".join(lines[first:number])) + "\n"
        number += 1
        language, _, rest = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Block(page, first + 1, language, title[1] if title else "", code, marks))
        marks = {}
    return found


def run_together(page: str) -> list[Block]:
    """Return the blocks of Python that are run one after the other, in one namespace."""
    python = (block for block in blocks(page) if block.language == "python")
    return [block for block in python if not Path(block.title).suffix and "shown" not in block.marks]
