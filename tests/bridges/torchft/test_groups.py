"""Replica groups of several processes, and of one that ``torchrun`` started without a process group."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from torch import distributed

from trainbus.eventloop.checkpoint import load

from . import groups

torchft = pytest.importorskip("torchft")
ROOT = Path(__file__).parents[3]


@contextmanager
def started(folder, group, size, epochs, address):
    """Run a replica group by ``torchrun``."""
    job = [str(Path(__file__).with_name("group_job.py")), str(folder), group, str(epochs)]
    command = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={size}", "--rdzv-backend=c10d"]
    own = {"TORCHFT_LIGHTHOUSE": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    with (folder / f"{group}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, *command, "--rdzv-endpoint=localhost:0", *job], env=os.environ | own, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines(folder, group, rank):
    return [json.loads(line) for line in (folder / f"{group}{rank}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_ranks_agree_within_their_group(tmp_path):
    """Group b begins late, heals on both ranks, and stops for one of them; group a goes on to the end."""
    server = groups.lighthouse(join_timeout_ms=3000)
    with ExitStack() as stack:
        a = stack.enter_context(started(tmp_path, "a", 2, 4, server.address()))
        until = time.monotonic() + 60
        while time.monotonic() < until and not ((one := tmp_path / "a0.jsonl").exists() and len(one.read_text()) > 200):
            time.sleep(0.05)
        b = stack.enter_context(started(tmp_path, "b", 2, 4, server.address()))
        assert b.wait(120) == 0, (tmp_path / "b.log").read_text()[-3000:]
        assert a.wait(120) == 0, (tmp_path / "a.log").read_text()[-3000:]
    server.shutdown()
    of_a, of_b = ([lines(tmp_path, group, rank) for rank in (0, 1)] for group in "ab")
    for ranks in (of_a, of_b):
        assert [one["iter"] for one in ranks[0]] == [one["iter"] for one in ranks[1]]
        assert [one["rate"] for one in ranks[0]] == [one["rate"] for one in ranks[1]]
    assert {one["rate"] for one in of_a[0]} == {0.01}
    assert [(rank[0]["samples"], rank[0]["iter"] > 2) for rank in of_b] == [(None, True)] * 2
    assert of_a[0][-1]["iter"] == 79
    last = of_b[0][-1]
    assert last["rate"] == 0.005
    assert 50 <= last["iter"] < 79
    # Both groups pass over their own shards alike: samples of one step are all different, and none comes twice in an epoch.
    for epoch in range(4):
        seen = [
            sample
            for ranks in (of_a, of_b)
            for rank in ranks
            for one in rank
            for sample in one["samples"] or ()
            if one["epoch"] == epoch
        ]
        assert len(seen) == len(set(seen))
    state = load(tmp_path / "run" / "epoch_4.safetensors")
    assert len(state["ranks"]) == 2
    assert state["stateful"]["torchft"]["step"] == state["progress"]["iter"] == 80


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft's log
def test_the_example_trains(tmp_path, monkeypatch):
    """``examples/torchft_digits.py``, one group of two."""
    pytest.importorskip("sklearn")
    server, store = groups.lighthouse(), distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    for name, value in {**place, "TORCHFT_LIGHTHOUSE": server.address(), "REPLICA_GROUP_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("torchft_digits", ROOT / "examples" / "torchft_digits.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.EPOCHS = 2
    example.main()
    server.shutdown()
    assert load(tmp_path / "runs" / "torchft" / "epoch_2.safetensors")["progress"]["update"] == 58
    assert (tmp_path / "runs" / "torchft" / "digits1" / "scalars.jsonl").exists()


@pytest.mark.timeout(200)
def test_torchrun_needs_no_process_group_for_one_process(tmp_path):
    server = groups.lighthouse()
    with started(tmp_path, "a", 1, 1, server.address()) as a:
        assert a.wait(120) == 0, (tmp_path / "a.log").read_text()[-3000:]
    server.shutdown()
    assert [one["iter"] for one in lines(tmp_path, "a", 0)] == [*range(40)]
    assert (tmp_path / "run" / "epoch_1.safetensors").exists()
