"""``HeartbeatHook``: with a client that only notes what it is asked, and under NVRx's own ``ft_launcher``."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.eventloop.checkpoint import commit, load
from trainbus.hooks import CheckpointHook, HeartbeatHook, heartbeat

from ..failing import said
from ..heartbeats import launch
from ..waiting import until
from . import heartbeat_job
from .conftest import batches, make_loop

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("heartbeat_job.py")
PATIENCE = 0.3  # seconds without a heartbeat that a test takes for the end of them; 15 looks


@pytest.fixture
def launched(monkeypatch):
    """``launched(**limits)``: as if ``ft_launcher`` had started this process."""
    return partial(launch, monkeypatch)


def at(bus, mount_point, iteration, action):
    """Call ``action`` at a mount point of an iteration of the run."""
    bus.on(mount_point, lambda event: action() if event.progress.iter == iteration else None, priority=90)


def ends(client):
    """Wait until no heartbeats come; return whether they have ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        before = client.beats
        time.sleep(PATIENCE)
        if client.beats == before:
            return True
    return False


def goes_on(client, number=5):
    """Wait for more heartbeats."""
    before = client.beats
    until(lambda: client.beats >= before + number)
    return True


def test_without_the_launcher_it_says_so_and_does_nothing(logs, no_thread_is_left):
    make_loop(HeartbeatHook()).run()
    (line,) = [entry for entry in logs if "ft_launcher" in entry["event"]]
    assert line["log_level"] == "info"


def test_a_training_sends_heartbeats_from_its_first_iteration_to_its_end(launched, no_thread_is_left):
    client, before = launched(), []
    loop = make_loop(HeartbeatHook(), max_epochs=1)
    at(loop.bus, "before_train_iter", 0, lambda: (time.sleep(PATIENCE), before.append(client.beats)))
    for iteration in (1, 2):
        at(loop.bus, "before_train_iter", iteration, lambda: until(lambda: client.beats > len(before) - 1))
    loop.run()
    assert before == [0]
    assert client.calls[0] == "connect"
    assert client.calls[-1] == "leave"


def test_heartbeats_come_at_most_once_in_an_interval(launched, change):
    client = launched()
    change(heartbeat.INTERVAL, 0.1)
    loop = make_loop(HeartbeatHook(), train_data=batches(200), max_epochs=1)
    begin = time.monotonic()
    loop.run()
    assert client.beats <= 1 + (time.monotonic() - begin) / 0.1


def test_a_training_thread_that_hangs_sends_none(launched):
    client, ended = launched(), []
    loop = make_loop(HeartbeatHook(), max_epochs=1)
    at(loop.bus, "after_train_iter", 2, lambda: ended.append(ends(client)))
    loop.run()
    assert ended == [True]


def test_an_evaluation_sends_heartbeats(launched):
    client, waited = launched(), []
    loop = make_loop(HeartbeatHook(), val_data=batches(6), test_data=batches(4), max_epochs=1)
    for stage in ("val", "test"):
        before = []
        loop.bus.on(f"before_{stage}", lambda event, before=before: before.append(client.beats))

        @loop.bus.on(f"before_{stage}_iter")
        def wait(event, before=before):  # for one heartbeat an iteration, from the first iteration of a run on
            until(lambda: client.beats >= before[0] + event.batch_idx)
            waited.append(event.progress.stage)

    loop.run()
    loop.test()
    assert waited == ["val"] * 6 + ["test"] * 4


@pytest.fixture
def slow_writes(monkeypatch):
    """``slow_writes.wait``: called before each write of a file."""
    slow = SimpleNamespace(wait=lambda: None)
    write = commit.write_all

    def wait_and_write(descriptor, *parts):
        slow.wait()
        write(descriptor, *parts)

    monkeypatch.setattr(commit, "write_all", wait_and_write)
    return slow


@pytest.mark.parametrize("where", ["the next save", "the end"])
def test_a_save_that_training_waits_for_is_no_hang_while_its_writer_makes_progress(where, launched, slow_writes, tmp_path):
    client, waited = launched(), []

    def wait():
        if not waited:
            waited.append(client.beats)
            for _ in range(20):
                commit.note_step()
                goes_on(client, 1)

    slow_writes.wait = wait
    saves = CheckpointHook(interval=1, by_epoch=False) if where == "the next save" else CheckpointHook()
    make_loop(HeartbeatHook(save_timeout=PATIENCE), saves, max_epochs=1, train_data=batches(8), work_dir=tmp_path).run()
    assert client.beats >= waited[0] + 20


def test_a_writer_that_hangs_ends_the_heartbeats_of_a_training_that_waits_for_it(launched, slow_writes, tmp_path):
    client, ended = launched(), []
    slow_writes.wait = lambda: ended or ended.append(ends(client))
    saves = CheckpointHook(interval=1, by_epoch=False)
    make_loop(HeartbeatHook(save_timeout=PATIENCE), saves, max_epochs=1, work_dir=tmp_path).run()
    assert ended == [True]


def test_a_writer_that_makes_progress_hides_no_training_thread_that_hangs(launched, slow_writes, tmp_path):
    client, ended = launched(), []
    slow_writes.wait = lambda: [(commit.note_step(), time.sleep(0.01)) for _ in iter(lambda: bool(ended), True)]
    loop = make_loop(HeartbeatHook(), CheckpointHook(interval=2, by_epoch=False), max_epochs=1, work_dir=tmp_path)
    at(loop.bus, "before_train_iter", 2, lambda: ended.append(ends(client)))
    loop.run()
    assert ended == [True]


def test_a_paused_run_sends_heartbeats(launched):
    client = launched()
    loop = make_loop(HeartbeatHook(), max_epochs=1)
    at(loop.bus, "after_train_iter", 1, loop.pause)
    waits, beats = [], []

    @loop.bus.on("run_paused")
    def wait(event):
        waits.append(threading.Thread(target=lambda: (beats.append(goes_on(client)), loop.unpause())))
        waits[0].start()

    loop.run()
    waits[0].join()
    assert beats == [True]


def test_sections_of_the_configuration_are_opened_and_begun_anew(launched, slow_writes, tmp_path):
    client = launched(section={"setup": 9.0, "step": 3.0, "checkpointing": 30.0})
    written = []

    def wait():
        if not written:
            written.append(len(client.calls))
            until(lambda: client.calls.count("checkpointing") > 2)

    slow_writes.wait = wait
    loop = make_loop(HeartbeatHook(), CheckpointHook(interval=3, by_epoch=False), max_epochs=1, work_dir=tmp_path)
    at(loop.bus, "before_train_iter", 2, lambda: until(lambda: "step" in client.calls))
    loop.run()
    assert client.beats == 0
    assert client.calls[:4] == ["connect", "setup", "end", "step"]
    assert client.calls[-2:] == ["end", "leave"]


def test_sections_that_the_configuration_lacks_are_not_opened(launched):
    client = launched(section={"mine": 3.0})
    loop = make_loop(HeartbeatHook(), max_epochs=1)
    at(loop.bus, "before_train_iter", 2, lambda: until(lambda: "end" in client.calls))
    loop.run()
    assert {*client.calls} == {"connect", "end", "leave"}


def test_a_configuration_without_limits_is_warned_of(launched, logs):
    launched(section={})
    make_loop(HeartbeatHook(), max_epochs=1).run()
    assert any(entry.get("id") == "heartbeat-without-limits" for entry in logs)


def test_a_run_that_ends_before_its_first_iteration_sends_one(launched):
    client = launched()
    with pytest.raises(RuntimeError, match="early"):
        make_loop(HeartbeatHook(), step=lambda model, batch: (_ for _ in ()).throw(RuntimeError("early"))).run()
    assert client.calls == ["connect", "beat", "leave"]


def test_a_monitor_that_is_gone_costs_a_line_in_the_log_and_no_training(launched, logs, no_thread_is_left):
    client = launched()
    loop = make_loop(HeartbeatHook(), max_epochs=1)
    at(loop.bus, "before_train_iter", 1, lambda: setattr(client, "fails", True))
    at(loop.bus, "before_train_iter", 3, lambda: until(lambda: any(entry.get("id") == "heartbeats-ended" for entry in logs)))
    loop.run()
    assert sum(entry.get("id") == "heartbeats-ended" for entry in logs) == 1


@pytest.mark.parametrize("when", ["before_run", "before_train", "before_train_iter"])
def test_a_hook_that_is_added_during_a_run_is_an_error(launched, when):
    """Without the error, a rank that hangs would never be ended."""
    launched()
    bus = Bus()
    bus.on(when, lambda event: bus.add(HeartbeatHook()), once=1)
    with pytest.raises(ConfigurationError, match="HeartbeatHook"), Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            list(run.train([1, 2]))


def test_a_monitor_that_cannot_be_reached_is_an_error_that_names_its_socket(launched):
    launched().fails = True
    with pytest.raises(ConfigurationError, match=r"/nowhere .*MonitorError.*FT_RANK_MONITOR_IPC_SOCKET"):
        make_loop(HeartbeatHook(), max_epochs=1).run()


def test_a_second_run_connects_again(launched):
    client, hook = launched(), HeartbeatHook()
    for _ in range(2):
        make_loop(hook, max_epochs=1).run()
    assert client.calls.count("connect") == client.calls.count("leave") == 2


def test_a_launcher_without_nvrx_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", None)
    assert "trainbus[nvrx]" in said(make_loop(HeartbeatHook()).run)


def test_limits_are_calculated_only_with_a_process_group(launched):
    launched()
    assert "init_process_group" in said(make_loop(HeartbeatHook(calculate_timeouts=True)).run)


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_calculated_limits_are_in_the_checkpoint_and_set_again(launched, group, tmp_path):
    for epochs in (1, 2, 3):
        client = launched(initial=60.0, section={"step": 3.0, "mine": 5.0})
        hook = HeartbeatHook(calculate_timeouts=True)
        make_loop(hook, CheckpointHook(interval=1), max_epochs=epochs, work_dir=tmp_path).run(resume="auto")
        saved = load(tmp_path / f"epoch_{epochs}.safetensors")["bus"]["hooks"]["HeartbeatHook"]
        # The first training has no resume, whose time belongs to the setup of later ones.
        assert saved == {"timeouts": {"current_timeouts": {"heartbeat": {"subsequent": 7.0}}} if epochs > 1 else {}}
        assert [call for call in client.calls if "calculate" in call] == ["calculate step"] * 2 * (epochs > 1)


def test_limits_for_other_sections_than_those_of_the_configuration_are_not_set(launched, group, logs):
    client = launched(initial=60.0, section={"step": 3.0})
    hook = HeartbeatHook(calculate_timeouts=True)
    state = {"heartbeat": {"subsequent": 9.0}, "section": {"section": {"step": 1.0, "more": 1.0}}}
    hook.load_state_dict({"timeouts": {"current_timeouts": state}})
    make_loop(hook, max_epochs=1).run()
    assert client.state == {"heartbeat": {"subsequent": 9.0}}
    assert any(entry.get("checkpoint") == ["more", "step"] for entry in logs)


@pytest.fixture
def monitor(monkeypatch, change):
    """NVRx's own monitor of this process, with limits."""
    nvrx = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")
    sections = {"setup": 60.0, "step": 30.0, "checkpointing": 30.0}
    limits = nvrx.FaultToleranceConfig(rank_section_timeouts=sections, enable_nic_monitor=False)
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        process = nvrx.RankMonitorServer.run_in_subprocess(limits, f"{folder}/s", mp_ctx=multiprocessing.get_context("spawn"))
        monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", f"{folder}/s")
        change(heartbeat.INTERVAL, 0.02)
        yield process
        process.kill()
        process.join()


def test_limits_that_nvrx_has_calculated_are_in_the_checkpoint_and_set_again(monitor, group, tmp_path):
    saved = [{}]
    for epochs in (1, 2, 3):
        hook, found = HeartbeatHook(calculate_timeouts=True), []
        loop = make_loop(hook, CheckpointHook(interval=1), max_epochs=epochs, work_dir=tmp_path)
        loop.bus.on("before_train", lambda event, hook=hook, found=found: found.append(dict(hook._thread._client.state_dict())))
        loop.bus.on("before_train_iter", lambda event: time.sleep(0.1))  # some heartbeats in each epoch
        loop.run(resume="auto")
        assert found[0]["current_timeouts"] == saved[-1]
        timeouts = load(tmp_path / f"epoch_{epochs}.safetensors")["bus"]["hooks"]["HeartbeatHook"]["timeouts"]
        saved.append(timeouts.get("current_timeouts", {}))
    assert saved[1] == {}  # the first training has not resumed
    assert saved[2]["heartbeat"]["were_calculated"]
    assert saved[2]["section"]["calculated_sections"] == ["setup", "step"]
    assert monitor.is_alive()


LIMITS = {
    "heartbeats": {"initial_rank_heartbeat_timeout": 60, "rank_heartbeat_timeout": 3},
    "sections": {
        "initial_rank_heartbeat_timeout": None,
        "rank_heartbeat_timeout": None,
        "rank_section_timeouts": {"setup": 60, "step": 3, "checkpointing": 3},
    },
}


@pytest.mark.parametrize(
    ("limits", "where", "ranks", "found"),
    [
        ("heartbeats", "step", 2, "Did not get subsequent heartbeat"),
        ("sections", "writer", 1, "Section 'checkpointing' has been open"),
    ],
)
def test_ft_launcher_restarts_a_rank_that_hangs_and_none_that_saves_or_validates_slowly(limits, where, ranks, found, tmp_path):
    pytest.importorskip("nvidia_resiliency_ext")
    (tmp_path / "limits.yaml").write_text(json.dumps({"fault_tolerance": {"workload_check_interval": 0.5, **LIMITS[limits]}}))
    command = [
        *(sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-cfg-path", tmp_path / "limits.yaml"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "3", "--nproc-per-node", str(ranks)),
        *(JOB, tmp_path, where),
    ]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=150)  # noqa: S603
    assert done.returncode == 0, done.stderr
    tries = sorted(path.name for path in tmp_path.glob("began-*"))
    assert tries == [f"began-{rank}-{number}" for rank in range(ranks) for number in (0, 1)], done.stderr
    assert re.search(found, done.stderr)
    began, iteration = map(float, (tmp_path / "began-0-1").read_text().split())
    assert iteration in ({3, 6} if where == "step" else {3})  # the save of the sixth was under way
    assert began > float((tmp_path / "hangs").read_text()) + 3  # not earlier than the limit
    model = heartbeat_job.make_model()
    heartbeat_job.make_loop(model, Bus(), tmp_path / "alone", lambda model, x: {}).run()
    for rank in range(ranks):
        assert torch.equal(torch.load(tmp_path / f"weight-{rank}.pt"), model.weight)
