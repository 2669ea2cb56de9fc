"""What README and the site show runs: Python, and commands that need no GPU and no network."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..scripts import Script
from .pages import DOCS, ROOT, Block, blocks, pages, run_together

sys.path.insert(0, str(DOCS / "_site"))
try:
    from continued import names, needs
finally:
    del sys.path[0]

pytestmark = [
    pytest.mark.xdist_group("docs"),  # one process runs all pages
    pytest.mark.timeout(700),  # all of them take two minutes, and on busy cores longer
]

ALL = {page: blocks(page) for page in pages()}
FIRST = ("README.md", "docs/start/first-run.md", "docs/start/your-loop.md")
"""The pages that every run of the tests runs; pytest -m long runs the others."""
RUN = [page for page, found in ALL.items() if any(block.language in ("python", "bash") for block in found)]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What became of each block of the pages that are tested: {page: [(line, outcome, seconds)]}."""
    here = [one for one in request.session.items if one.path == request.path and "outcomes" in one.fixturenames]
    tested = {one.callspec.params["page"] for one in here}
    results = tmp_path_factory.mktemp("docs") / "results.jsonl"
    run = f"import runpy; runpy.run_path({str(Path(__file__).with_name('run_pages.py'))!r}, run_name='__main__')"
    environment = {"PYTHONPATH": ROOT, "COLUMNS": 80, "TRACKIO_DIR": results.parent}
    chosen = [page for page in RUN if page in tested]
    script = Script(run, results.parent, arguments=[results, *chosen], environment=environment, cwd=results.parent)
    done = script.wait(600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {page: [] for page in RUN}
    for line in results.read_text().splitlines():
        result = json.loads(line)
        found[result["page"]].append((result["line"], result["outcome"], result["seconds"]))
    return found


@pytest.mark.parametrize("page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.long) for page in RUN])
def test_the_blocks_of_a_page_run_one_after_the_other(page, outcomes):
    failed = [
        (f"{page}:{line}", outcome) for line, outcome, _ in outcomes[page] if outcome != "ok" and "skipped" not in outcome
    ]
    assert not failed, "\n".join(": ".join(one) for one in failed)


def _python(found: list[Block]) -> list[Block]:
    return [block for block in found if block.language == "python" or block.title.endswith(".py")]


def _error(block: Block) -> str:
    try:
        ast.parse("\n" * (block.line - 1) + block.code, block.page)
    except SyntaxError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", [page for page, found in ALL.items() if _python(found)])
def test_all_python_parses(page):
    assert [error for error in map(_error, _python(ALL[page])) if error] == []


@pytest.mark.parametrize("page", RUN)
def test_a_block_needs_nothing_but_blocks_above_it(page):
    found = run_together(page)
    named = [taken for taken, _ in needs([block.code for block in found])]
    unknown = {block.line: names(block.code)[0] - taken for block, taken in zip(found, named, strict=True)}
    assert not {line: missing for line, missing in unknown.items() if missing}


def test_what_a_block_needs_includes_what_its_sources_need():
    found = ["import torch\nx = torch.zeros(1)", "y = 1", "def double():\n    return 2 * x", "x = double(), [y for y in ()]"]
    assert needs(found) == [(set(), []), (set(), []), ({"x"}, [0]), ({"double"}, [0, 2])]
    assert needs(["x = 1", "x = x + 1", "for x in range(3):\n    print(x)"]) == [(set(), []), ({"x"}, [0]), (set(), [])]


SCRIPTS = [(page, block.title) for page, found in ALL.items() for block in found if block.title.endswith(".sh")]


@pytest.mark.parametrize(("page", "title"), SCRIPTS)
def test_a_script_for_a_scheduler_parses(page, title):
    (code,) = (block.code for block in ALL[page] if block.title == title)
    checked = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)  # noqa: S607
    assert checked.returncode == 0, checked.stderr


def test_a_block_that_is_only_shown_says_why():
    assert not [f"{block.page}:{block.line}" for found in ALL.values() for block in found if block.marks.get("shown") == ""]
