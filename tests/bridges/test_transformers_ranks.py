"""The bus in a ``transformers.Trainer`` with two processes under ``torchrun``."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

SCRIPT = """
import json, os, sys
import torch
import transformers
from pathlib import Path
from torch import nn
from trainbus import Bus, CheckpointHook, EMAHook, Hook

torch.set_num_threads(1)
folder, attached, steps, resume = Path(sys.argv[1]), sys.argv[2] == "bus", int(sys.argv[3]), sys.argv[4] == "resume"


class First(Hook):
    ranks = "rank0"
    seen = 0

    def after_train_iter(self, event):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x, labels=None):
        y = self.inner(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


torch.manual_seed(0)
x = torch.randn(32, 3)
data = [{"x": one, "labels": one.sum()} for one in x]
args = transformers.TrainingArguments(
    str(folder), use_cpu=True, report_to=[], max_steps=steps, per_device_train_batch_size=2, save_strategy="no",
    eval_strategy="epoch", disable_tqdm=True, learning_rate=0.01, lr_scheduler_type="constant", logging_strategy="no",
    dataloader_pin_memory=False,
)
trainer = transformers.Trainer(Net(), args, train_dataset=data, eval_dataset=data[:8])
first, ema, names, begun = First(), EMAHook(momentum=0.1), [], []
if attached:
    bus = Bus()
    bus.add(first, ema, CheckpointHook(interval=6, by_epoch=False, save_last=False))
    bus.on("checkpoint_committed", lambda event: names.append(Path(event.path).name))
    bus.on("before_train", lambda event: begun.append((event.run.rank, event.run.world_size, event.progress.iter)))
    bus.attach(trainer)
trainer.train(resume_from_checkpoint=resume or None)
rank = int(os.environ["RANK"])
result = {"weights": [one.tolist() for one in trainer.model.state_dict().values()], "seen": first.seen, "names": names}
result["average"] = [one.tolist() for one in ema.average.tensors.values()] if attached else None
result["begun"] = begun
Path(f"{folder}.{rank}.json").write_text(json.dumps(result))
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(name, attached="bus", steps=12, resume=""):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(  # noqa: S603 - the interpreter that runs this test
            [*torchrun, "script.py", str(tmp_path / name), attached, str(steps), resume],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.mark.timeout(150)
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
