"""``trainbus run`` under ``torchrun``: the same configuration, with as many processes as there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import load

PARTS = """
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x)

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
model = "parts:Net"
optimizer = { type = "torch.optim:AdamW", lr = 0.01 }
step = "parts:step"
data.train = "parts:data"
data.val = "parts:data"
loop = { max_epochs = 2, seed = 3 }
default_hooks.checkpoint = { max_keep_ckpts = 1 }
"""


@pytest.fixture
def trainbus(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "mine.toml").write_text(CONFIG)
    for name in ("hooks", "eventloop"):  # files of the user's with these names do not get in the way
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported in place of a package of trainbus')")

    def run(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
        return subprocess.run(  # noqa: S603 - the interpreter that runs this test
            [sys.executable, *torchrun, "-m", "trainbus", "run", "mine.toml", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("epoch_*.safetensors")
    return {name: torch.as_tensor(value) for name, value in load(file)["state_dict"].items()}


def test_two_processes_equal_one_on_the_same_global_batches(trainbus, tmp_path):
    alone = trainbus("loop.work_dir=alone", processes=0)
    both = trainbus("loop.work_dir=both", "data.train.batch_size=4")
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    one, other = weights(tmp_path / "alone"), weights(tmp_path / "both")
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"alone", "both"}
    assert not (tmp_path / "both-2").exists(), "all processes work in the same folder"


def test_lines_and_files_are_written_once_and_a_resume_takes_another_number_of_processes(trainbus, tmp_path):
    both = trainbus("default_hooks.logger.interval=4", "data.train.batch_size=4")
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("trainbus run") == both.stdout.count("files in") == 1
    assert both.stdout.count("epoch 1/2  iter 4/8") == 1
    alone = trainbus("--resume", "loop.max_epochs=3", "default_hooks.logger.interval=4", processes=0)
    assert alone.returncode == 0, alone.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [4, 8, 12, 16, 20, 24]


def test_a_user_function_can_shard_the_model(trainbus, tmp_path):
    both = trainbus("wrap=parts:shard", "loop.max_epochs=1")
    assert both.returncode == 0, both.stderr
    assert list((tmp_path / "runs/mine").glob("*.shards"))


def test_an_error_is_reported_by_each_rank_without_waiting(trainbus):
    both = trainbus("--resume", "runs/nothing")
    assert both.returncode == 1
    for rank in (0, 1):
        assert f"trainbus run (rank {rank}): --resume runs/nothing: no such file or folder" in both.stderr
