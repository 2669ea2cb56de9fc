"""The bus in a ``transformers.Trainer`` with two processes under ``torchrun``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent / "transformers_script.py"
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4)
needs_cpu_resume = pytest.mark.xfail(OLD, reason="Transformers before 5.4 loads an optimizer to 'cpu:0'", strict=True)


@pytest.fixture
def train(tmp_path):
    def run(name, attached="bus", steps=12, resume=""):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(  # noqa: S603 - the interpreter that runs this test
            [*torchrun, SCRIPT, str(tmp_path / name), attached, str(steps), resume],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(2)]

    return run


@needs_cpu_resume
@pytest.mark.timeout(300)
def test_two_processes_train_save_and_resume_together(train, tmp_path):
    alone = train("alone", "none")
    whole = train("whole")
    assert whole[0]["weights"] == whole[1]["weights"] == alone[0]["weights"]
    assert [one["seen"] for one in whole] == [12, 0]  # the hook of rank 0
    assert [one["names"] for one in whole] == [["iter_6", "iter_12"], []]
    assert [one["begun"] for one in whole] == [[[0, 2, 0]], [[1, 2, 0]]]
    files = {path.name for path in (tmp_path / "whole" / "iter_6").iterdir()}
    assert files >= {"trainbus.pt", "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["iter_12", "iter_6"]
    train("parts", steps=7)
    rest = train("parts", resume="resume")
    assert rest[0]["begun"] == [[0, 2, 6]]
    assert rest[0]["seen"] == 12
    for name in ("weights", "average"):
        assert rest[0][name] == rest[1][name] == whole[0][name]
    assert torch.tensor(rest[0]["weights"][0]).isfinite().all()


@needs_cpu_resume
@pytest.mark.timeout(300)
def test_two_processes_write_their_checkpoints_beside_the_training(train, tmp_path):
    alone = train("alone", "none")
    whole = train("whole", "checkpoints")
    assert whole[0]["weights"] == whole[1]["weights"] == alone[0]["weights"]
    assert whole[0]["names"] == ["checkpoint-6", "iter_6", "checkpoint-12", "iter_12"]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint-12", "iter_12", "iter_6"]
    for name in ("checkpoint-12", "iter_6"):
        folder = tmp_path / "whole" / name
        digests = json.loads((folder / "trainbus-digests.json").read_text())
        assert digests.keys() >= {"trainbus.pt", "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert whole[0]["best"] == whole[1]["best"] == str(tmp_path / "whole" / "checkpoint-12")
    train("parts", "checkpoints", steps=7)
    rest = train("parts", "checkpoints", resume="resume")
    for name in ("weights", "average"):
        assert rest[0][name] == rest[1][name] == whole[0][name]
