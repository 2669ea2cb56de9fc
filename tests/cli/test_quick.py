"""Commands that only read answer at once: they do not import torch, which takes seconds."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainbus import Bus, CheckpointHook, JSONLinesWriter, LoggerHook, RunRecordHook, TrainLoop, Update
from trainbus.cli import app
from trainbus.eventloop.checkpoint import save
from trainbus.eventloop.checkpoint.sharded import ShardStage

from ..scripts import TRAINBUS

OLD = Path(__file__).parent.parent / "ranks" / "old_files" / "sharded-0.2"
WITHOUT_TORCH = f"import sys; sys.modules['torch'] = None; {TRAINBUS}"


def sharded(path: Path) -> None:
    """Write a checkpoint whose only tensor is in a directory beside it."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        state = {"state_dict": {"weight": weight}, "progress": {"epoch": 1, "iter": 7}}
        tree, parts = ShardStage().copy_parts(state, path, "0123abcd", distributed.group.WORLD)
        parts.commit(path, lambda: save(tree, path).bytes)
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run has written: its record, scalars and checkpoints, and sharded ones beside."""
    folder = tmp_path_factory.mktemp("quick")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = Bus(Update(), RunRecordHook(), LoggerHook(interval=1, writers=[JSONLinesWriter()]))
    bus.add(CheckpointHook(interval=1, save_best="accuracy"))
    data = [torch.ones(4, 2)] * 3
    TrainLoop(
        model,
        optimizer,
        step=lambda model, batch: model(batch).mean(),
        val_step=lambda model, batch: {"accuracy": torch.tensor(0.5)},
        train_data=data,
        val_data=data,
        bus=bus,
        max_epochs=2,
        work_dir=folder / "runs" / "one",
    ).run()
    sharded(folder / "sharded" / "now.safetensors")
    shutil.copytree(OLD, folder / "sharded-0.2")
    return folder


@pytest.fixture
def quick(folder: Path, tmp_path: Path) -> Callable[..., str]:
    """``quick(*words)`` runs the command where torch cannot be imported, and returns what it prints."""

    def run(*words: str) -> str:
        environment = {"HOME": str(tmp_path), "PATH": "", "COLUMNS": "80", "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", WITHOUT_TORCH, *words]
        found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_version_needs_no_torch(quick):
    assert quick("--version").startswith("trainbus ")


def test_help_needs_no_torch_and_has_a_line_for_each_command(quick):
    printed = quick("--help")
    for name in app:
        assert name in printed


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "runs", "report", "doctor", "hooks", "checkpoint", "checkpoint ls", "trace merge"])
def test_help_of_a_command_needs_no_torch(quick, command):
    assert f"Usage: trainbus {command}" in quick(*command.split(), "--help")


def test_completion_needs_no_torch_and_knows_options_of_all_commands(quick, tmp_path):
    quick("--install-completion", "--shell", "bash")
    (script,) = (file for file in tmp_path.rglob("*") if file.is_file())
    text = script.read_text()
    for option in ("--print-config", "--verify", "--torchtitan", "--import"):
        assert f'"{option}"' in text


def test_runs_needs_no_torch(quick):
    assert "accuracy 0.5" in quick("runs")
    assert '"val/' not in quick("runs", "--json", "--columns", "run,best,train/loss")


def test_report_needs_no_torch(quick, tmp_path):
    quick("report", "runs/one", "-o", str(tmp_path / "page.html"))
    assert "accuracy" in (tmp_path / "page.html").read_text()


def test_checkpoint_ls_needs_no_torch(quick):
    printed = quick("checkpoint", "ls", "runs/one")
    assert printed.count("complete") == 2
    assert "last_checkpoint: epoch_2.safetensors" in printed


@pytest.mark.parametrize("name", ["sharded", "sharded-0.2"])
def test_checkpoint_ls_of_sharded_files_needs_no_torch(quick, name):
    assert "complete" in quick("checkpoint", "ls", name)


@pytest.mark.parametrize("name", ["runs/one", "sharded", "sharded-0.2"])
def test_checkpoint_verify_needs_no_torch(quick, name):
    assert "verified" in quick("checkpoint", "verify", name)
