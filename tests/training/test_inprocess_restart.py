"""NVRx's in-process restart: it calls the function of a training again, after another rank has failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainbus.eventloop import Bus
from trainbus.hooks import LoggerHook

from . import inprocess_job

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("where", ["collective", "python"])
def test_a_training_that_is_called_again_goes_on_from_its_last_save(where, tmp_path, free_tcp_port):
    pytest.importorskip("nvidia_resiliency_ext")
    given = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, inprocess_job.__file__, tmp_path, where, str(free_tcp_port)]
    processes = []
    with (tmp_path / "log.txt").open("w") as log:
        for rank in "01":
            place = given | {"RANK": rank, "LOCAL_RANK": rank}
            processes.append(subprocess.Popen(command, env=place, stdout=log, stderr=log))  # noqa: S603
    try:
        assert [process.wait(120) for process in processes] == [0, 0], (tmp_path / "log.txt").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    alone = inprocess_job.make_model()
    inprocess_job.make_loop(alone, Bus(LoggerHook(interval=1)), tmp_path / "alone").run()
    for rank in range(2):
        calls, state, weight, [error] = torch.load(tmp_path / f"done-{rank}.pt")
        assert (calls, state) == (1, "idle")
        assert rank or error == "RankShouldRestart" or (where == "collective" and error == "RuntimeError")
        assert torch.equal(weight, alone.weight)
    losses = [
        {line["step"]: line["train/loss"] for line in map(json.loads, path.read_text().splitlines()) if "train/loss" in line}
        for path in (tmp_path / "runs" / "scalars.jsonl", tmp_path / "alone" / "scalars.jsonl")
    ]
    assert losses[0] == losses[1]
