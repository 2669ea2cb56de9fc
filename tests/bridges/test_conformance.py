"""What every host keeps, by ``trainbus.testing.HostChecks``: our own loops, the toy of "Write a bridge", and four trainers."""

import pytest

from trainbus.convert import torch_file
from trainbus.eventloop import Bus
from trainbus.eventloop.checkpoint import commit
from trainbus.hooks import CheckpointHook, HeartbeatHook
from trainbus.testing import HostChecks, HostJob

from ..heartbeats import launch
from ..waiting import until
from .conformance import HOSTS, WARNINGS, hosts, job_of

pytestmark = WARNINGS

for name in HOSTS:
    try:
        members = {"job": job_of(name)}
    except pytest.skip.Exception as missing:
        members = {"job": HostJob, "pytestmark": pytest.mark.skip(reason=str(missing))}
    globals()[f"Test{name.title()}"] = type(f"Test{name.title()}", (HostChecks,), members)


@hosts("toy")  # which writes its files itself
def test_heartbeats_go_on_while_training_waits_for_a_slow_save_and_end_with_the_run(host, tmp_path, monkeypatch):
    client, write, waited = launch(monkeypatch), commit.write_all, []

    def write_slowly(descriptor, *parts):
        if not waited:
            waited.append(client.beats)
            until(lambda: commit.note_step() or client.beats > waited[0] + 3)
        write(descriptor, *parts)

    for module in (commit, torch_file):  # each has imported it
        monkeypatch.setattr(module, "write_all", write_slowly)
    host(tmp_path, Bus(HeartbeatHook(), CheckpointHook(interval=2, by_epoch=False)), beside=True).fit()
    assert waited
    assert client.calls[0] == "connect"
    assert client.calls[-1] == "leave"
