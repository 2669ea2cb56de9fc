import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cyclopts import App
from rich.console import Console

from trainbus.cli import app, main
from trainbus.eventloop import load_weights
from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.offload.lane import Lane

from .failing import fails

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:sklearn")


def commands(group: App, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command and of every command within one."""
    yield path
    for name in group:
        if not name.startswith("-"):
            yield from commands(group[name], *path, name)


COMMANDS = list(commands(app))


def test_the_commands_are_found():
    assert {(), ("run",), ("demo",), ("hooks",), ("checkpoint",), ("checkpoint", "ls")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_fits_80_columns_and_explains_every_argument_and_option(trainbus, words, capsys, here):
    printed, err = trainbus(*words, "--help")
    assert err == ""
    assert printed.startswith(" ".join(["Usage: trainbus", *words]))
    assert max(map(len, printed.splitlines())) <= 80
    app.help_print(words, console=Console(width=400))
    rows = [re.split(r" {2,}", line.strip("│* ")) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    for name, *explained in rows:
        assert explained, name
        assert not explained[0].startswith("["), name  # the default alone


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_complete_commands_and_options(trainbus, here, shell):
    trainbus("--install-completion", "--shell", shell, "--output", "script")
    script = (here / "script").read_text()
    for word in ("checkpoint", "verify", "dry-run", "epochs"):
        assert word in script


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainbus che", {"checkpoint"}),
        ("trainbus checkpoint ", {"ls", "verify", "show", "export", "import"}),
        ("trainbus run --d", {"--dashboard", "--dry-run"}),
    ],
)
def test_bash_completes_commands_and_options(trainbus, here, line, offered):
    trainbus("--install-completion", "--shell", "bash", "--output", "script")
    words = line.split(" ")
    press_tab = f"source ./script; COMP_WORDS=({line} ''); COMP_CWORD={len(words) - 1}; _trainbus; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", press_tab], capture_output=True, text=True, check=True)  # noqa: S603, S607
    assert set(done.stdout.split()) == offered


one_worker = pytest.mark.xdist_group("demos")


class Demos(NamedTuple):
    """The demo of 20 epochs in runs/digits, what it printed, its files, and two runs of one epoch that came after it."""

    folder: Path
    printed: str
    files: dict[Path, bytes]
    others: str


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Iterator[Demos]:
    def run(*words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["demo", *words]) == 0
        return printed.getvalue()

    folder = tmp_path_factory.mktemp("demos")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        printed = run()
        files = {path: path.read_bytes() for path in (folder / "runs/digits").rglob("*") if path.is_file()}
        others = run("--epochs", "1", "--hooks") + run("--epochs", "1", "--out", "runs/digits")
    yield Demos(folder, printed, files, others)


@pytest.mark.long
@one_worker
def test_the_demo_leaves_checkpoints_scalars_of_every_iteration_and_a_summary(demos):
    run = demos.folder / "runs/digits"
    newest = run / (run / "last_checkpoint").read_text()
    assert newest.name == "epoch_20.safetensors"
    assert load(newest)["progress"]["epoch"] == 20
    assert (run / "run.json").is_file()
    assert len(list(run.glob("best_accuracy_*.safetensors"))) == 1
    lines = [json.loads(line) for line in (run / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 681))
    saves = f"20 checkpoints of {newest.stat().st_size / 1000:.0f} kB written beside the training, which waited"
    for words in ("averaged weights", "raw weights", "best epoch", saves, "trainbus report"):
        assert words in demos.printed
    assert re.search(r"^train/loss \S+ [▁-█]+ \S+$", demos.printed, re.MULTILINE)
    assert "after_train_iter" not in demos.printed


@one_worker
def test_the_demo_fits_a_screen_and_a_half_of_80_columns(demos):
    lines = demos.printed.splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80
    [result] = [line for line in lines if line.startswith("test accuracy")]
    averaged, raw = map(float, re.findall(r"([\d.]+)%", result))
    assert averaged > raw + 1


@one_worker
def test_the_demo_and_its_report_count_the_same_checkpoints(demos, trainbus):
    printed = trainbus("report", demos.folder / "runs/digits", "-o", demos.folder / "report.html").out
    assert "\n20 checkpoints held training up" in printed


@one_worker
def test_the_demo_writes_for_tensorboard_where_it_is_installed(demos):
    pytest.importorskip("tensorboard")
    assert demos.printed.endswith("tensorboard --logdir runs/digits\n")
    assert list((demos.folder / "runs/digits/tensorboard").glob("events.*"))


@one_worker
def test_a_later_run_shows_its_hooks_overwrites_no_earlier_one_and_equals_one_of_the_same_seed(demos):
    from trainbus.demo import network

    assert all(word in demos.others for word in ("after_train_iter", "EMAHook", "thread"))
    assert {path: path.read_bytes() for path in demos.files} == demos.files
    one, other = (load(demos.folder / f"runs/digits-{n}" / "epoch_1.safetensors")["state_dict"] for n in (2, 3))
    assert all(one[key].equal(other[key]) for key in one)
    load_weights(network(), one)


@one_worker
def test_resume_continues_from_the_last_checkpoint_and_tests_a_complete_run_again(demos, trainbus):
    run = demos.folder / "runs/digits-2"
    assert "68 iterations" in trainbus("demo", "--epochs", "2", "--out", run, "--resume").out
    saved = load(run / "epoch_2.safetensors")
    assert saved["progress"]["iter"] == 68
    assert saved["bus"]["hooks"]["Evidence"]["best"][1] == 1  # the best epoch of both sessions
    assert "averaged weights" in trainbus("demo", "--epochs", "2", "--out", run, "--resume").out


def test_the_demo_needs_no_tensorboard(here, trainbus, monkeypatch):

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # an import fails
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert "tensorboard" not in trainbus("demo", "--epochs", "1").out


def test_the_filters_of_the_demos_hook_table_stay_in_one_line_in_80_columns():
    from trainbus.demo import make_bus, network

    bus = make_bus(torch.optim.SGD(network().parameters()), 20, Console())
    for subscription in bus.subscriptions:
        if subscription.lane is not None:
            Lane.count(subscription.lane, delivered=99_999)  # of the base class: there are no bytes to free
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(bus.describe(stats=True))
    for row in bus.describe().rows:
        assert row.filter in captured.get()
    assert "…" not in captured.get()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("demo --epochs 1.5", ["--epochs", "'1.5'"]),
        ("demo --epochs 0", ["--epochs", '"0"', ">= 1"]),
        ("demo --seed -1", ["--seed", '"-1"', ">= 0"]),
        (f"demo --seed {'9' * 30}", ["--seed", str(2**63)]),
        (f"demo --seed {'9' * 5000}", ["--seed", f"'{'9' * 80}…'"]),
        ("demo --epoch 1", ["--epoch", "--epochs"]),
        ("demo loop.max_epochs=3", ["'loop.max_epochs=3'"]),
        ("run", ["CONFIG", "trainbus run --help"]),
        ("run x.toml --dryrun", ["--dryrun", "--dry-run", "trainbus run --help"]),
        ("run x.toml --loop.max_epochs=3", ["such as loop.max_epochs=3"]),
        ("events after_trane", ["'after_trane'"]),
        ("hooks CheckpointHok", ["'CheckpointHok'", "did you mean 'CheckpointHook'"]),
        ("nonsense", ["trainbus --help"]),
        ("", ["Usage: trainbus"]),
    ],
)
def test_a_usage_error_exits_with_status_2_and_names_option_value_and_help(arguments, names, trainbus):
    err = trainbus(*arguments.split(), status=2).err
    assert all(name in err for name in names)
    assert not arguments.startswith("demo") or err.splitlines()[-1] == "trainbus demo --help shows the options"
    assert not arguments.startswith("demo") or len(err) < 400


OUT = (".", "", "..", "/")


# From 3.14 on pathlib raises no error for such a name, so the folder is tried.
TOO_LONG = f"{'x' * 80}…: cannot be used: File name too long" if sys.version_info < (3, 14) else "File name too long"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--resume"], "found no last_checkpoint"),
        *(
            (["--out", out], f"{Path(out)} is not empty; give the run an empty folder, such as {Path(out, 'run')}")
            for out in OUT
        ),
        (["--out", "x" * 300], TOO_LONG),
        (["--out", "notes.txt/run"], "notes.txt/run: cannot create this folder: Not a directory"),
    ],
    ids=["resume", "here", "nothing", "above", "root", "long", "in a file"],
)
def test_a_folder_that_cannot_be_that_of_a_run_is_an_error_before_the_training(here, trainbus, words, told):
    (here / "notes.txt").touch()
    assert told in trainbus("demo", *words, status=2).err


def test_output_is_limited_to_the_terminals_encoding(trainbus, here, monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
    trainbus("events")
    assert b"after_train_iter" in screen.getvalue()


@pytest.mark.parametrize(("struck_at", "hint"), [(1, "no checkpoint was written yet"), (2, "--resume --out mine")])
def test_ctrl_c_prints_how_to_resume(here, trainbus, monkeypatch, struck_at, hint):
    from trainbus import demo

    make_bus = demo.make_bus

    def make(*arguments):
        bus = make_bus(*arguments)
        bus.on("before_train_epoch", fails(KeyboardInterrupt), when=lambda event: event.progress.epoch + 1 == struck_at)
        return bus

    monkeypatch.setattr(demo, "make_bus", make)
    err = trainbus("demo", "--epochs", "3", "--out", "mine", status=130).err
    assert "trainbus demo: interrupted" in err
    assert hint in err
