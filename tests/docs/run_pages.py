"""``python tests/docs/run_pages.py RESULTS PAGE...``: run the blocks of pages; write what became of each as JSON lines.

Each page has a namespace and a folder of its own, in which its blocks continue one another. Commands ``trainbus ...`` and
``python FILE ...`` are called in this process: one that imports torch takes seconds to start.
"""

import gc
import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from pages import DOCS, Block, blocks, run_together

sys.path.insert(0, str(DOCS / "_site"))
from continued import needs

from trainbus.cli import main as trainbus

SLOW = os.environ.get("TRAINBUS_DOCS") == "all"


def run_page(page: str, results):
    """Run the blocks of one page in a new folder, up to the first that fails."""
    namespace = {"__name__": "docs_page"}
    before = Path.cwd(), list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            for block in blocks(page):
                began = time.perf_counter()
                try:
                    outcome = run_block(block, namespace)
                except (Exception, SystemExit):  # noqa: BLE001 - what is wrong is the result
                    outcome = traceback.format_exc()
                if outcome is not None:
                    result = {"page": page, "line": block.line, "outcome": outcome, "seconds": time.perf_counter() - began}
                    print(json.dumps(result), file=results, flush=True)
                if outcome not in (None, "ok") and not outcome.startswith("skipped"):
                    break
            else:
                if SLOW:
                    run_copies(page, results)
        finally:
            namespace.clear()
            gc.collect()
            os.chdir(before[0])
            sys.path[:] = before[1]
            for name in set(sys.modules) - before[2]:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                    del sys.modules[name]


def run_copies(page: str, results):
    """Run each block again, in a new namespace, after nothing but the blocks that the site's button copies with it."""
    found = run_together(page)
    for block, (_, others) in zip(found, needs([block.code for block in found]), strict=True):
        copied = [*(found[other] for other in others), block]
        if any("once" in one.marks for one in copied):
            continue
        namespace = {"__name__": "docs_page"}
        try:
            outcomes = {run_block(one, namespace) for one in copied}
            outcome = min(outcomes - {"ok"}, default="ok")
        except (Exception, SystemExit):  # noqa: BLE001 - what is wrong is the result
            outcome = f"copied without the rest of the page: {traceback.format_exc()}"
        print(json.dumps({"page": page, "line": block.line, "outcome": outcome, "seconds": 0}), file=results, flush=True)


def run_block(block: Block, namespace) -> str | None:
    """Run one block; return None if there is nothing to run, else ``ok``, ``skipped: ...`` or what is wrong."""
    if Path(block.title).suffix:
        path = Path(block.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")
        return None
    if block.language not in ("python", "bash") or "shown" in block.marks:
        return None
    missing = [name for name in block.marks.get("needs", "").split(", ") if name and find_spec(name) is None]
    if missing:
        return f"skipped: {', '.join(missing)} not installed"
    if "slow" in block.marks and not SLOW:
        return "skipped: slow"
    if block.language == "bash":
        for line in block.code.replace("\\\n", " ").splitlines():
            if command := line.partition(" #")[0].strip():
                run_command(command)
        return "ok"
    expected = block.marks.get("raises")
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
    try:
        exec(code, namespace)  # noqa: S102 - the text of a page
    except Exception as error:
        if expected in {kind.__name__ for kind in type(error).__mro__}:
            return "ok"
        raise
    return "ok" if expected is None else f"{block.page}:{block.line}: no {expected}"


def run_command(command: str):
    """Run a command of a shell block; raise RuntimeError if it fails."""
    words = shlex.split(command)
    if words[0] == "trainbus" and not set(words) & {"|", "&&", ">"}:
        status = trainbus(words[1:])
    elif words[0] == "python" and words[1].endswith(".py"):
        arguments, sys.argv = sys.argv, words[1:]
        try:
            runpy.run_path(words[1], run_name="__main__")
        finally:
            sys.argv = arguments
        status = 0
    else:
        status = subprocess.run(["bash", "-c", command]).returncode  # noqa: S603, S607
    if status:
        raise RuntimeError(f"{command}: exit status {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Path(sys.argv[1]).open("w") as results:
        for page in sys.argv[2:]:
            run_page(page, results)
