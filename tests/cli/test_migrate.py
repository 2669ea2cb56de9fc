"""Code of trainbus 0.2 moves to the names of this version, and what nobody can decide is told."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from trainbus.cli import main
from trainbus.cli.migrate import migrated

ROOT = Path(__file__).parents[2]
RELEASE = "861f002a"  # 0.2.0


def moved(text: str, name: str = "/nowhere/mine.py") -> tuple[str, list[str]]:
    after, undecided = migrated(text.encode(), Path(name))
    return after.decode(), [f"{one.line}: {one.what}" for one in undecided]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loop.val()  # at the end\n", "loop.validate()  # at the end\n"),
        ("event.run.resume()\n", "event.run.unpause()\n"),
        (
            "with Run(bus) as mine:\n    mine.request_save( 'a' )\n",
            "with Run(bus) as mine:\n    mine.checkpoints.save( 'a' )\n",
        ),
        ("self.loop.checkpoint_now()\n", "self.loop.save()\n"),
        ("print(event.run.best, self._run.total_iters)\n", "print(event.run.checkpoints.best, self._run.data.total_iters)\n"),
        (
            "from trainbus import Bus, CheckpointFailed\n",
            "from trainbus import Bus\nfrom trainbus.events import CheckpointFailed\n",
        ),
        ("from trainbus import ConfigurationError as E\n", "from trainbus.errors import ConfigurationError as E\n"),
        ("from hooks.demo import make_loop\n", "from trainbus.demo import make_loop\n"),
        ("import eventloop.observe\neventloop.observe.Costs\n", "import trainbus.observe\ntrainbus.observe.Costs\n"),
        ("import hooks\nhooks.EMAHook()\n", "import trainbus.hooks\ntrainbus.hooks.EMAHook()\n"),
        (
            "from trainbus import Bus\nBus().attach(trainer, work_dir='x')  # one\n",
            "from trainbus import Bus, attach\nattach(Bus(), trainer, work_dir='x')  # one\n",
        ),
        ("import trainbus\ntrainbus.attach(t)\n", "import trainbus\ntrainbus.attach(trainbus.Bus(), t)\n"),
        (
            "import torch\nrun.report_image('noise', torch.ones(\n    3, 2, 2))  # a comment\n",
            "import torch\nfrom trainbus.media import Image\nrun.report(noise=Image(torch.ones(\n    3, 2, 2)))  # a comment\n",
        ),
        (
            "from PIL import Image\nrun.report_image('noise', Image.open(path))\n",
            "from PIL import Image\nimport trainbus.media\nrun.report(noise=trainbus.media.Image(Image.open(path)))\n",
        ),
        (
            "import torch\nevent.run.report_histogram(f'w/{n}', w, bins=9)\n",
            "import torch\nfrom trainbus.media import Histogram\nevent.run.report(**{f'w/{n}': Histogram(w, bins=9)})\n",
        ),
        ("CheckpointHook(1, save_begin=5)\n", "CheckpointHook(1, begin=5)\n"),
        ("trainbus.EMAHook(begin_epoch=2)\n", "trainbus.EMAHook(by_epoch=True, begin=2)\n"),
        ("x = {'val': 1}\nmine.val()\nsettings.best\n", "x = {'val': 1}\nmine.val()\nsettings.best\n"),
    ],
)
def test_old_names_become_new_ones_and_the_rest_stays(before, after):
    assert moved(before) == (after, [])
    assert moved(after) == (after, [])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import os\nthing.request_save('a')\n", "2: .request_save"),
        ("getattr(run, 'checkpoint_now')()\n", "1: .*'checkpoint_now'"),
        ("run.report_text(*both)\n", "1: .*NAME=Text"),
        ("from trainbus import Nowhere\n", "1: trainbus has no Nowhere"),
        ("from trainbus import (\n    Bus,  # mine\n    AfterIter,\n)\n", "1: .*from trainbus.events import AfterIter"),
    ],
)
def test_what_cannot_be_decided_is_told_with_its_line(text, told):
    after, (line,) = moved(text)
    assert after == text
    assert re.match(told, line)


def test_a_module_of_the_users_own_name_stays(tmp_path):
    (tmp_path / "hooks").mkdir()
    text = "from hooks import Mine\n"
    after, (line,) = moved(text, str(tmp_path / "train.py"))
    assert (after, line.startswith("1: hooks may be your own")) == (text, True)


def test_notebooks_and_markdown_keep_their_form(tmp_path):
    lines = ["import torch\n", "run.report_text('a', 'b')\n", "loop.val()"]
    cells = [{"cell_type": "markdown", "source": ["loop.val()"]}, {"cell_type": "code", "source": lines, "outputs": []}]
    text = json.dumps({"cells": cells, "nbformat": 4}, indent=1)
    after, undecided = moved(text, "mine.ipynb")
    (kept, code) = json.loads(after)["cells"]
    assert (kept, undecided) == (cells[0], [])
    assert "".join(code["source"]) == (
        "import torch\nfrom trainbus.media import Text\nrun.report(a=Text('b'))\nloop.validate()"
    )
    page = "loop.val()\n\n=== one\n\n    ```python\n    loop.val()\n    ```\n\n```\nloop.val()\n```\n"
    assert moved(page, "page.md") == (page.replace("python\n    loop.val()", "python\n    loop.validate()"), [])


def test_the_command_shows_a_diff_and_writes_on_request(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("loop.val()\nthing.request_save()\n")
    assert main(["migrate", str(file)]) == 1
    out = capsys.readouterr().out
    assert "-loop.val()\n+loop.validate()\n" in out
    assert f"{file}:2: .request_save" in out
    assert file.read_text().startswith("loop.val()")
    main(["migrate", "--write", str(tmp_path)])
    assert file.read_text().startswith("loop.validate()")


# ------------------------------------------------------------------------------------------- the code of 0.2 itself


def git(*words: str) -> str:
    return subprocess.run(  # noqa: S603
        ["git", "-C", str(ROOT), *words],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The examples and pages of 0.2.0, moved."""
    try:
        files = git("ls-tree", "-r", "--name-only", RELEASE, "examples", "docs", "README.md").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git, and the history back to 0.2.0")
    folder = tmp_path_factory.mktemp("old")
    for name in files:
        if name.endswith((".py", ".md")) and not name.startswith("docs/_site"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(git("show", f"{RELEASE}:{name}"))
    assert main(["migrate", "--write", str(folder)]) == 0
    return folder


def test_the_code_of_0_2_compiles_and_uses_no_name_that_is_gone(old):
    scripts = [*old.rglob("*.py")]
    assert len(scripts) > 10
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainbus"):
                for alias in node.names:
                    assert hasattr(import_module(node.module), alias.name), f"{script}: {alias.name}"
            elif isinstance(node, ast.ImportFrom | ast.Import):
                assert not {"eventloop", "hooks"} & {alias.name for alias in node.names}, script


@pytest.mark.long
@pytest.mark.parametrize("script", ["own_loop.py", "trio_app.py"])
def test_an_example_of_0_2_runs(old, tmp_path, script):
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(old / "examples" / script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
