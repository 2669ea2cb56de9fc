"""``trainbus run``, ``trainbus hooks`` and ``trainbus events``, as a new user would type them."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import fsspec
import pytest
from rich import get_console

from trainbus import eventloop
from trainbus.cli import main
from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.events.event import registry
from trainbus.eventloop.registry import registered
from trainbus.observe.dashboard.server import SERVERS

from ..observe.traces import Picture

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:sklearn")

DIGITS = str(Path(eventloop.__file__).resolve().parent.parent / "examples" / "digits.toml")

PARTS = """
import torch
from torch import nn
from trainbus.eventloop.registry import register
from trainbus.eventloop import Event, Hook
from trainbus import eventloop
from trainbus.hooks import Writer

class DensifiedForTests(Event):
    points: int

@register
class GrowerForTests(Hook):
    '''Publishes an event of its own.'''
    def __init__(self, every: int = 2):
        self.every = every
    def after_train_iter(self, event):
        if (event.progress.iter + 1) % self.every == 0:
            event.run.publish(DensifiedForTests, points=event.progress.iter)

@register
class CounterForTests(Hook):
    '''Hears an event of ours.'''
    def densified_for_tests(self, event):
        with open("points.txt", "a") as file:
            file.write(f"{event.points}\\n")

@register(name="lines_for_tests")
class Lines(Writer):
    '''Writes a file of lines.'''
    def __init__(self, filename: str = "lines.txt"):
        super().__init__(interval=1)
        self.filename = filename
    def write_scalars(self, scalars, step, where):
        with open(self.filename, "a") as file:
            file.write(f"{step}\\n")

def net(width: int = 3):
    return nn.Linear(2, width)

def data(batches: int = 4):
    return [torch.ones(2, 2)] * batches

def step(model, batch):
    return model(batch).square().mean()
"""

CONFIG = """
imports = ["{module}", "torch.optim"]
model = "{module}:net"
optimizer = {{ type = "torch.optim:SGD", lr = 0.1 }}
step = "{module}:step"
data.train = "{module}:data"
loop.max_epochs = 1
default_hooks.logger = {{ writers = ["lines_for_tests"] }}
custom_hooks = ["GrowerForTests", "CounterForTests"]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in; events that other tests have declared are not there."""
    for name, event in list(registry.items()):
        if event.__module__.partition(".")[0] != "trainbus":
            monkeypatch.delitem(registry, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(get_console(), "_width", 120)
    return tmp_path


@pytest.fixture
def project(here, registry):
    """A file of the user's beside a configuration in a folder of its own; its module is forgotten afterwards."""
    module = "user_parts_for_tests"
    (here / "configs").mkdir()
    (here / "configs" / f"{module}.py").write_text(PARTS)
    (here / "configs" / "mine.toml").write_text(CONFIG.format(module=module))
    yield "configs/mine.toml"
    sys.modules.pop(module, None)


def test_the_demo_as_a_configuration_trains_the_same_weights_as_the_demo(trainbus, here):
    trainbus("demo", "--epochs", "1", "--out", "demo")
    changes = ["loop.max_epochs=1", "custom_hooks[1].scheduler.lr_lambda.over=34", "loop.work_dir=ours"]
    trainbus("run", DIGITS, *changes)
    one, other = (load(here / name / "epoch_1.safetensors")["state_dict"] for name in ("demo", "ours"))
    assert one.keys() == other.keys()
    assert all(one[key].equal(other[key]) for key in one)


def test_a_run_prints_where_its_files_are(here, trainbus):
    printed = trainbus("run", DIGITS, "loop.max_epochs=2").out
    files = {path.name for path in (here / "runs/digits").iterdir()}
    assert {"epoch_2.safetensors", "last_checkpoint", "scalars.jsonl", "config.json", "test_metrics.json"} <= files
    assert json.loads((here / "runs/digits/config.json").read_text())["loop"] == {"max_epochs": 2, "seed": 0}
    for words in ("last validation", "accuracy", "test", "68 iterations", "runs/digits"):
        assert words in printed


def test_an_iteration_based_training_is_saved_as_often_as_it_validates(here, project, trainbus):
    lengths = ["loop.max_epochs=null", "loop.max_iters=6", "loop.val_interval=2"]
    printed = json.loads(trainbus("run", project, "--print-config", *lengths).out)
    assert printed["default_hooks"]["checkpoint"].items() >= {"by_epoch": False, "interval": 2}.items()
    trainbus("run", project, *lengths, "loop.work_dir=out")
    assert {path.stem for path in (here / "out").glob("*.safetensors")} == {"iter_2", "iter_4", "iter_6"}


def test_own_hook_writer_and_event_from_a_file_beside_the_configuration_are_picked_up(trainbus, here, project):
    trainbus("run", project, "custom_hooks=['GrowerForTests', 'CounterForTests']")
    assert (here / "points.txt").read_text().split() == ["1", "3"]
    assert (here / "lines.txt").read_text().split() == ["1", "2", "3", "4"]


def test_a_dry_run_shows_the_hook_table_and_writes_nothing(here, project, trainbus):
    printed = trainbus("run", project, "--dry-run", "custom_hooks[0]=GrowerForTests", "default_hooks.checkpoint=false").out
    for words in ("Hooks in the order of a run", "densified_for_tests", "CounterForTests", "OptimizerHook", "not trained"):
        assert words in printed
    assert "CheckpointHook" not in printed
    assert not (here / "runs").exists()


def test_a_check_prints_what_it_found_writes_nothing_and_fails_for_an_error(here, trainbus):
    before = {*here.rglob("*")}
    printed = trainbus("run", DIGITS, "--check").out
    for words in ("accuracy, loss", "checkpoint", "ok: 0 errors"):
        assert words in printed
    change = 'custom_hooks=[{type="EarlyStoppingHook", monitor="acuracy", rule="greater"}]'
    found = json.loads(trainbus("run", DIGITS, "--check", "--json", change, status=1).out)
    assert "'acuracy'" in found["errors"][0]
    assert "did you mean 'accuracy'?" in found["errors"][0]
    assert {*here.rglob("*")} == before


@pytest.mark.parametrize("options", [["--check", "--dry-run"], ["--check", "--resume"], ["--json"]])
def test_options_beside_a_check_that_have_no_effect_are_an_error(here, project, trainbus, options):
    assert "--check" in trainbus("run", project, *options, status=2).err


@pytest.mark.parametrize("option", [["--dashboard"], ["--dashboard", "8123"], ["--dashboard=0"]])
def test_the_dashboard_is_added_with_a_port_and_without_before_and_after_overrides(here, project, trainbus, option):
    assert "Dashboard.post" in trainbus("run", *option, project, "model.width=5", "--dry-run", "loop.max_epochs=2").out


def test_a_run_with_a_dashboard_prints_where_it_is(here, project, capfd, change):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    servers: dict = {}
    change(SERVERS, servers)
    assert main(["run", project, "--dashboard", "0"]) == 0
    (server,) = servers.values()
    server.close()
    assert f"the dashboard is at http://127.0.0.1:{server.port}/#token={server.token}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loop.max_epochs=x", "loop.max_epochs: expected int | None, got str 'x'"),
        ("custom_hooks[0]=GrowrForTests", "custom_hooks[0].type: 'GrowrForTests' is not a registered hook (did you mean"),
        ("model.widht=3", "model.widht: net has no option 'widht' (did you mean 'width'?)"),
        ("imports=[]", "model: 'user_parts_for_tests:net' is in a module that is not listed under imports"),
        ("loop", "'loop': changes are written as key=value"),
        ("optimizer.lr=-1", "optimizer: SGD does not take these options: Invalid learning rate: -1.0"),
        ("loop.seed=99999999999999999999", "seed=99999999999999999999: "),
        *((f"imports=['{name}']", f"imports[0]: '{name}' is not the name of a module") for name in ("", ".x")),
        ("loop.work_dir=.", ". is not empty; give the run an empty folder, such as run"),
        *((f"--dashboard={port}", f"--dashboard={port}: give a port from 1 to 65535") for port in (65536, -1, "web")),
        ("imports=['broken']", "imports[0]: 'broken' cannot be imported: '(' was never closed ({}/configs/broken.py, line 1)"),
        ("imports=['exits']", "imports[0]: 'exits' ended the program by sys.exit(3) while it was imported"),
    ],
)
def test_a_configuration_error_exits_with_status_2_and_suggestions_and_no_traceback(here, project, trainbus, change, message):
    (here / "configs/broken.py").write_text("x = (")
    (here / "configs/exits.py").write_text("raise SystemExit(3)")
    told = trainbus("run", project, "--dry-run", change, status=2).err
    assert told.startswith(f"trainbus run: {message.replace('{}', str(here))}")
    assert "Traceback" not in told


def test_an_error_of_the_users_own_code_keeps_its_traceback_also_within_torch(here, project, trainbus):
    source = "from torch.utils.data import Dataset\nclass Sized(Dataset):\n    def __len__(self): raise ValueError('mine')\n"
    (here / "configs/sized.py").write_text(source)
    data = "{type = 'torch.utils.data:DataLoader', shuffle = true, dataset = {type = 'sized:Sized'}}"
    with pytest.raises(ValueError, match="mine"):
        main(["run", project, "imports=['user_parts_for_tests', 'torch.optim', 'torch.utils', 'sized']", f"data.train={data}"])
    sys.modules.pop("sized")


def test_a_folder_or_a_missing_configuration_names_those_that_are_there(project, trainbus):
    assert trainbus("run", "configs/mime.toml", status=2).err.endswith("(did you mean 'mine.toml'?)\n")
    (Path("configs") / "other.toml").mkdir()
    assert trainbus("run", "configs", status=2).err.endswith("configs has mine.toml\n")
    assert trainbus("run", "mine", status=2).err.endswith(f"no configuration is in {Path.cwd()}\n")


def test_hooks_lists_every_registered_hook_with_options_types_defaults_and_mount_points(here, trainbus, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = trainbus("hooks").out
    title, *lines = printed.splitlines()
    assert max(map(len, lines)) <= 120
    names = sorted((entry.name for entry in registered("hook")), key=str.lower)
    assert title == "Hooks"  # one line for each comes first
    assert [line.split()[0] for line in lines[: len(names)]] == names
    assert lines[len(names)].strip() == ""
    for kind in ("hook", "writer", "average"):
        for entry in registered(kind):
            assert re.search(rf"^{re.escape(entry.name)}\b", printed, re.MULTILINE), entry.name
    assert re.search(r"momentum +float +0\.0002", printed)
    assert re.search(r"monitor +str +required", printed)
    assert re.search(r"'greater' \| 'less' \| None +None", printed)
    assert "priority 90 VERY_LOW, at before_train, after_train_iter, after_train_epoch" in printed


def test_hooks_and_events_of_a_users_module_are_listed_with_it(project, trainbus, monkeypatch, here):
    monkeypatch.chdir(here / "configs")
    printed = trainbus("hooks", "--import", "user_parts_for_tests").out
    assert "GrowerForTests" in printed
    assert "lines_for_tests" in printed
    assert re.search(r"priority 50 NORMAL, at densified_for_tests *$", printed, re.MULTILINE)
    events = trainbus("events", "--import", "user_parts_for_tests").out
    before, _, after = events.partition("Declared by hooks and by your modules")
    assert "densified_for_tests" not in before
    assert re.search(r"densified_for_tests +publishes +points: int", after)


def test_events_lists_the_mount_points_in_order_with_their_fields(here, trainbus, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = trainbus("events").out
    assert max(map(len, printed.splitlines())) <= 120
    found = [line.split()[0] for line in printed.splitlines() if line and not line.startswith(" ")]
    names = [name for name in found if name in eventloop.mount_points()]
    assert names == eventloop.mount_points()
    assert "after_train_iter iterations batch_idx: int, batch: live" in " ".join(printed.split())


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.fixture
def trained(trainbus, here, project):
    """Two runs of one epoch, of four iterations."""
    for _ in range(2):
        trainbus("run", project)
    return project


@pytest.mark.parametrize(
    "arguments",
    [["--resume", "runs/mine", "configs/mine.toml"], ["configs/mine.toml", "loop.max_epochs=3", "--resume=runs/mine"]],
)
def test_resume_continues_the_named_run(here, trained, trainbus, arguments):
    assert "12 iterations" in trainbus("run", *arguments, "loop.max_epochs=3").out
    assert (here / "runs/mine/last_checkpoint").read_text() == "epoch_3.safetensors"
    assert (here / "runs/mine-2/last_checkpoint").read_text() == "epoch_1.safetensors"
    assert {path.name for path in (here / "runs").iterdir()} == {"mine", "mine-2"}


def test_an_override_replaced_by_the_checkpoint_is_reported(trainbus, here, trained):
    err = trainbus("run", "--resume", trained, "optimizer.lr=0.5", "loop.max_epochs=2").err
    told = "your options differ from the checkpoint"
    assert told in err
    assert "optimizer.lr is 0.1, not 0.5" in err
    assert told not in trainbus("run", trained, "--resume", "loop.max_epochs=3").err


def test_resume_from_a_checkpoint_continues_in_a_new_folder(here, trained, trainbus):
    fsspec.filesystem("memory").pipe("/epoch_1.safetensors", (here / "runs/mine/epoch_1.safetensors").read_bytes())
    for number, source in ((3, "runs/mine/epoch_1.safetensors"), (4, "memory://epoch_1.safetensors")):
        assert "8 iterations" in trainbus("run", trained, "--resume", source, "loop.max_epochs=2").out
        assert {path.name for path in (here / f"runs/mine-{number}").glob("*.safetensors")} == {"epoch_2.safetensors"}
    assert {path.name for path in (here / "runs/mine").glob("*.safetensors")} == {"epoch_1.safetensors"}


def test_a_resume_error_is_reported_before_a_folder_is_created(here, project, trainbus):
    for resume, message in (
        ([], "--resume found no last_checkpoint in runs/mine"),
        (["runs/mime"], "--resume runs/mime: no such file or folder"),
        (["configs"], "--resume found no last_checkpoint in configs"),
        (["memory://nowhere/epoch_1.safetensors"], "--resume memory://nowhere/epoch_1.safetensors: no such file or folder"),
        (["://"], "--resume :: no such file or folder"),
        (["configs/user_parts_for_tests.py"], "configs/user_parts_for_tests.py is not a checkpoint"),
    ):
        assert message in trainbus("run", project, "--resume", *resume, status=2).err
    assert not (here / "runs").exists()


def test_the_newest_run_is_the_one_of_this_configuration_that_was_begun_last_also_in_a_copy(here, trained, trainbus):
    (here / "configs/mine_too.toml").write_text((here / "configs/mine.toml").read_text())
    trainbus("run", "configs/mine_too.toml", "loop.max_epochs=2")
    os.utime(here / "runs/mine/last_checkpoint", (2e9, 2e9))
    trainbus("run", "--resume", "auto", trained, "loop.max_epochs=2")
    assert (here / "runs/mine-2/last_checkpoint").read_text() == "epoch_2.safetensors"
    assert (here / "runs/mine/last_checkpoint").read_text() == "epoch_1.safetensors"


def test_resume_auto_begins_a_run_and_goes_on_with_one_also_from_a_store_where_the_disk_is_empty(here, project, trainbus):
    """What a scheduler, or ``torchrun``, starts again and again by one command."""
    saved = f"memory://{here.name}"
    words = [project, "--resume", "auto", f"default_hooks.checkpoint.out_dir={saved}"]
    assert "resumed" not in trainbus("run", *words).err
    assert "iter=4" in trainbus("run", *words, "loop.max_epochs=2").err
    shutil.rmtree(here / "runs")
    assert "iter=8" in trainbus("run", *words, "loop.max_epochs=3").err
    assert {path.name for path in (here / "runs").iterdir()} == {"mine"}
    assert fsspec.filesystem("memory").exists(f"/{here.name}/mine/epoch_3.safetensors")


def test_ctrl_c_prints_how_to_resume(here, trained, trainbus):
    parts = here / "configs/user_parts_for_tests.py"
    parts.write_text(parts.read_text() + "\ndef interrupted(model, batch):\n    raise KeyboardInterrupt\n")
    sys.modules.pop("user_parts_for_tests")
    registry.pop("densified_for_tests")
    words = [trained, "--resume", "runs/mine", "step=user_parts_for_tests:interrupted", "loop.max_epochs=2"]
    said = trainbus("run", *words, status=130).err
    assert "trainbus run: interrupted" in said
    assert "epoch_1.safetensors with --resume runs/mine\n" in said


@pytest.mark.long
def test_a_run_with_trace_leaves_a_picture_of_50_iterations_or_of_those_of_its_trace_hook(trainbus, here):
    """``trainbus trace merge`` is tested beside the files that it merges."""
    trainbus("run", DIGITS, "loop.max_epochs=5", "loop.work_dir=all", "--trace")
    picture = Picture(here / "all/trace.json")
    picture.check()
    assert picture.iterations == list(range(100, 150))
    hook = 'custom_hooks=[{type="TraceHook", first=3, iterations=2}]'  # another one is not added
    trainbus("run", DIGITS, "loop.max_epochs=1", "loop.work_dir=some", hook, "--trace")
    assert Picture(here / "some/trace.json").iterations == [3, 4]
