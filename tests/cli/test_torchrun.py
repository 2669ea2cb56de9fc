"""``trainbus run`` under ``torchrun``: the same configuration, with as many processes as there are.

The first test starts ``torchrun``. The others give their processes what it gives them, and start in less time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from trainbus.cli import main
from trainbus.eventloop.checkpoint import load

from ..scripts import TRAINBUS, run_on_ranks

PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net():
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

def data(batch_size=8, shuffle=False):
    x = torch.linspace(-3, 3, 64).unsqueeze(1)
    return DataLoader(TensorDataset(x, x.sin()), batch_size=batch_size, shuffle=shuffle)

def step(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)

def shard(model):
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
"""

CONFIG = """
imports = ["parts", "torch.optim"]
model = "parts:net"
optimizer = { type = "torch.optim:AdamW", lr = 0.01 }
step = "parts:step"
data.train = "parts:data"
data.val = "parts:data"
loop = { max_epochs = 2, seed = 3 }
default_hooks.checkpoint = { max_keep_ckpts = 1 }
"""


RUN = ("run", "mine.toml")
COLUMNS = {"COLUMNS": "100"}


@pytest.fixture
def here(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "mine.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def alone(here, monkeypatch):
    """``alone(*arguments)`` runs the configuration in this process."""
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda *arguments: main([*RUN, *arguments])
    sys.modules.pop("parts", None)


@pytest.fixture
def both(here):
    """``both(*arguments, status=0)`` runs it in two processes; returns how they ended."""

    def run(*arguments: str, status: int = 0) -> list[subprocess.CompletedProcess[str]]:
        ended = run_on_ranks(TRAINBUS, here, cwd=here, arguments=[*RUN, *arguments], environment=COLUMNS)
        assert [one.returncode for one in ended] == [status, status], [one.stderr for one in ended]
        return ended

    return run


@pytest.fixture
def torchrun(here):
    """``torchrun(*words, options=())`` has it start two processes; returns how it ended."""

    def run(*words: str, options: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
        return subprocess.run(  # noqa: S603 - the interpreter that runs this test
            [*agent, "-m", "trainbus", *RUN, *words],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, **COLUMNS, **variables},
        )

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("epoch_*.safetensors")
    return {name: torch.as_tensor(value) for name, value in load(file)["state_dict"].items()}


@pytest.mark.long
def test_two_processes_equal_one_on_the_same_global_batches(here, alone, torchrun):
    assert alone("loop.work_dir=alone") == 0
    for name in ("hooks", "eventloop"):  # files of the user's with these names do not get in the way
        (here / f"{name}.py").write_text("raise AssertionError('imported in place of a package of trainbus')")
    both = torchrun("loop.work_dir=both", "data.train.batch_size=4")
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("trainbus run") == both.stdout.count("files in") == 1
    one, other = weights(here / "alone"), weights(here / "both")
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)
    assert {path.name for path in here.iterdir() if path.is_dir()} >= {"alone", "both"}
    assert not (here / "both-2").exists(), "all processes work in the same folder"


@pytest.mark.long
def test_lines_and_files_are_written_once_and_a_resume_takes_another_number_of_processes(here, alone, both):
    first, second = both("default_hooks.logger.interval=4", "data.train.batch_size=4")
    for once in ("trainbus run", "files in", "epoch 1/2  iter 4/8"):
        assert (first.stdout.count(once), second.stdout.count(once)) == (1, 0)
    assert alone("--resume", "loop.max_epochs=3", "default_hooks.logger.interval=4") == 0
    lines = [json.loads(line) for line in (here / "runs/mine/scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [4, 8, 12, 16, 20, 24]


@pytest.mark.long
def test_a_global_batch_is_divided_among_the_processes(here, alone, both):
    batch = ("loop.global_batch=16", "loop.max_epochs=1", "data.train.shuffle=true")
    assert alone(*batch, "loop.work_dir=alone") == 0
    both(*batch, "loop.work_dir=both")
    one, other = weights(here / "alone"), weights(here / "both")
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_a_user_function_can_shard_the_model(here, both):
    both("wrap=parts:shard", "loop.max_epochs=1")
    assert list((here / "runs/mine").glob("*.shards"))


def test_an_error_is_reported_by_each_rank_without_waiting(both):
    for rank, ended in enumerate(both("--resume", "runs/nothing", status=2)):
        assert f"trainbus run (rank {rank}): --resume runs/nothing: no such file or folder" in ended.stderr


@pytest.mark.long
def test_a_resume_finds_the_run_on_the_disk_of_any_process(here, alone):
    assert alone("loop.max_epochs=1") == 0
    for disk in ("disk0", "disk1"):
        (here / disk).mkdir()
        for file in ("parts.py", "mine.toml"):
            shutil.copy(here / file, here / disk)
    (here / "runs").rename(here / "disk1/runs")
    source = f"import os; os.chdir('disk' + os.environ['RANK']); {TRAINBUS}"
    ended = run_on_ranks(source, here, cwd=here, arguments=[*RUN, "--resume"], environment=COLUMNS)
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    assert [path.name for path in (here / "disk0/runs/mine").glob("*.safetensors")] == ["epoch_2.safetensors"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "restarts", "warned"),
    [("1:4", 0, "nnodes=1:4"), ("2", 0, ""), ("2:2", 0, ""), ("1", 3, "max_restarts=3")],
)
def test_a_job_whose_restarts_torch_may_break_says_so_at_its_start(here, nodes, restarts, warned):
    job = {**COLUMNS, "PET_NNODES": nodes, "TORCHELASTIC_MAX_RESTARTS": restarts}
    (ended,) = run_on_ranks(TRAINBUS, here, size=1, cwd=here, arguments=[*RUN, "loop.max_epochs=1"], environment=job)
    assert ended.returncode == 0, ended.stderr
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in ended.stderr) == bool(warned)
    assert warned in ended.stderr


STRUCK = """
import os, signal

def struck(model, batch):
    if os.environ["RANK"] == "1" and model.training:
        signal.raise_signal(signal.SIGTERM)
    return step(model, batch)
"""


@pytest.mark.long
def test_a_signal_to_one_process_ends_all_with_the_status_of_a_preempted_run(here, both):
    (here / "parts.py").write_text(PARTS + STRUCK)
    both("step=parts:struck", "custom_hooks=[{type = 'PreemptionHook'}]", status=75)
    saved = here / "runs/mine" / (here / "runs/mine/last_checkpoint").read_text()
    assert saved.match("iter_[1-9].safetensors")
    assert saved.exists()


AGENT_STRUCK = """
import os, signal, time

strikes = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"

def struck(model, batch):
    global strikes
    if model.training and strikes:
        strikes = False
        os.kill({process}(), signal.SIGTERM)
        time.sleep(1)  # the agent passes it on in this iteration
    return step(model, batch)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "status", "starts", "last"),
    [("os.getppid", 1, 1, "iter_*.safetensors"), ("os.getpid", 0, 2, "epoch_2.safetensors")],
    ids=["the agent ends and passes no status on", "a worker's 75 restarts all workers"],
)
def test_the_agent_of_torchrun_decides_about_a_signal(here, torchrun, process, status, starts, last):
    (here / "parts.py").write_text(PARTS + AGENT_STRUCK.format(process=process))
    ended = torchrun(
        "--resume",
        "auto",
        "step=parts:struck",
        "custom_hooks=[{type='PreemptionHook'}]",
        options=["--max-restarts=3"],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else a restart may hang
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.count("trainbus run") == starts
    saved = here / "runs/mine" / (here / "runs/mine/last_checkpoint").read_text()
    assert saved.match(last)
    assert saved.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("model=parts:no_such_function", "no_such_function"),  # before the run
        ("step=parts:broken", "ZeroDivisionError"),  # in it
    ],
    ids=["a configuration", "a step"],
)
def test_a_failure_is_in_the_error_file_of_torchrun_with_its_traceback(here, change, cause):
    (here / "parts.py").write_text(f"{PARTS}\ndef broken(model, batch):\n    1 / 0\n")
    file = here / "error.json"
    job = {**COLUMNS, "TORCHELASTIC_ERROR_FILE": str(file)}
    (ended,) = run_on_ranks(TRAINBUS, here, size=1, cwd=here, arguments=[*RUN, change], environment=job)
    assert ended.returncode
    failure = json.loads(file.read_text())["message"]
    assert cause in failure["message"]
    assert "Traceback" in failure["extraInfo"]["py_callstack"]
