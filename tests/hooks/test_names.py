"""Names that are not UTF-8, as of files that came from another system, cost no logger and no record its lines."""

import json
import os
import sys

import pytest
from torch.optim import SGD

from trainbus.eventloop import Bus
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, ConsoleWriter, CSVWriter, JSONLinesWriter, LoggerHook
from trainbus.media import Text
from trainbus.observe import Dashboard, RunFolder, RunRecordHook, TraceHook
from trainbus.observe.dashboard import Server
from trainbus.observe.trace.chrome import read_trace

from ..observe.dashboards import Visitor
from .conftest import own_loop, small_model

NAME = os.fsdecode(b"caf\xe9")


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode there")
def test_names_that_are_not_utf_8_cost_no_lines(tmp_path, logs, capsys, trainbus):
    folder = tmp_path / NAME
    writers = [JSONLinesWriter(), CSVWriter(), ConsoleWriter(interval=1), ConsoleWriter(interval=2)]
    bus = Bus(LoggerHook(1, writers=writers), RunRecordHook(), TraceHook(1, 2), CheckpointHook(1), Dashboard(port=0))

    @bus.on("after_train_iter", "after_val_iter", priority=0)
    def report(event):
        event.run.report(**{NAME: 2.0})
        event.run.report(**{NAME: Text(NAME)})

    model = small_model()
    own_loop(bus, model, SGD(model.parameters(), lr=0.1), val=1, work_dir=folder, name=NAME, config={NAME: NAME})
    assert [log for log in logs if log["log_level"] in ("warning", "error")] == []
    lines = [json.loads(line) for line in (folder / "scalars.jsonl").read_text().splitlines()]
    assert [line["train/caf\\udce9"] for line in lines[:4]] == [2.0] * 4
    assert lines[4]["val/caf\\udce9"] == 2.0
    assert "train/caf\\udce9" in (folder / "scalars.csv").read_text()
    assert "caf\\udce9 2" in capsys.readouterr().out
    assert [text.name for text in RunFolder(folder).media()] == ["train/caf\\udce9"] * 4 + ["val/caf\\udce9"]
    assert RunFolder(folder).manifest().name == "caf\\udce9"
    assert "caf\\\\udce9" in (folder / "record.jsonl").read_text()
    assert "caf\\\\udce9" in (folder / "config.json").read_text()
    assert read_trace(folder / "trace.json")["traceEvents"]
    assert load(folder / "epoch_1.safetensors")["progress"]["iter"] == 4
    assert "caf\\\\udce9" in trainbus("runs", tmp_path, "--json").out
    with Visitor(Server.at(port=0)) as visitor:
        run = visitor.client.get("/runs.json").json()["runs"][-1]
        assert run["name"] == "caf\\udce9"
        answers = {
            "/metrics": 'name="train/caf\\\\udce9"',
            f"/curves.json?runs={run['number']}:0": "caf\\\\udce9",
            f"/runs/{run['number']}/events": "caf\\\\udce9",
        }
        for path, part in answers.items():
            assert part in visitor.client.get(path).text, path
