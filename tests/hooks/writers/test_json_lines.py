import json
import math
import os
import time

import pytest

from trainbus.hooks import JSONLinesWriter
from trainbus.hooks.writers import RunFacts, Where

from .conftest import logging_loop, write

AT = Where("train", epoch=2, iter=7, batch=3)


@pytest.fixture
def writer(tmp_path):
    """One that is open, with a run in an empty folder."""
    writer = JSONLinesWriter()
    writer.open(RunFacts("digits", tmp_path))
    yield writer
    writer.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_an_object_with_step_epoch_iter_and_time(writer, tmp_path):
    before = time.time()
    writer.write_scalars({"train/loss": 0.5}, 0, AT)
    writer.flush()
    [line] = lines(tmp_path / "scalars.jsonl")
    assert before <= line.pop("time") + 0.001 <= time.time() + 0.002
    assert line == {"step": 0, "epoch": 2, "iter": 7, "train/loss": 0.5}


def test_an_incomplete_last_line_is_cut_off(tmp_path):
    path = tmp_path / "scalars.jsonl"
    path.write_text('{"step": 0}\n{"st')
    write(JSONLinesWriter(), tmp_path, (1, {"train/loss": 1e300}))
    assert path.read_text().splitlines()[0] == '{"step": 0}'
    assert [line["train/loss"] for line in lines(path)[1:]] == [1e300]


@pytest.mark.parametrize(("value", "spelled"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_nan_and_infinities_are_written_as_words(writer, tmp_path, value, spelled):
    writer.write_scalars({"train/loss": value}, 0, AT)
    writer.flush()
    text = (tmp_path / "scalars.jsonl").read_text()
    assert f'"train/loss":{spelled}' in text
    assert "null" not in text
    assert str(json.loads(text)["train/loss"]) == str(value)


@pytest.mark.parametrize("name", ["train/loss", 'train/":null'])
@pytest.mark.parametrize("values", [(0.5, 1 / 3, 2), (0.5, math.nan, 0.25), (math.inf, True, 1e300), (2**70, 0.5, -(10**400))])
def test_rows_that_are_written_together_are_the_same_lines(writer, tmp_path, monkeypatch, name, values):
    monkeypatch.setattr("time.time", lambda: 1764000000.5)
    rows = [({name: value, "train/lr": 0.1}, step, AT) for step, value in enumerate(values)]
    writer.write_rows(rows)
    for row in rows:
        writer.write_scalars(*row)
    writer.flush()
    texts = (tmp_path / "scalars.jsonl").read_text().splitlines()
    assert len(texts) == 6
    assert texts[:3] == texts[3:]
    assert [str(json.loads(text)[name]) for text in texts[:3]] == [str(value) for value in values]


def test_a_subclass_may_change_each_line(tmp_path):
    class Shouting(JSONLinesWriter):
        def append(self, line: bytes) -> None:
            super().append(line.upper())

    writer = Shouting()
    writer.open(RunFacts("digits", tmp_path))
    writer.write_rows([({"train/loss": 0.5}, 0, AT), ({"train/loss": 0.25}, 1, AT)])
    writer.close()
    assert [line["TRAIN/LOSS"] for line in lines(tmp_path / "scalars.jsonl")] == [0.5, 0.25]


def test_test_metrics_go_to_a_separate_file_and_so_does_a_configuration_that_is_not_empty(writer, tmp_path):
    writer.write_scalars({"test/accuracy": 0.75}, 3, Where("test", epoch=3, iter=9))
    writer.write_config({})
    assert not (tmp_path / "config.json").exists()
    writer.write_config({"lr": 0.1, "name": "ü"})
    writer.flush()
    line = json.loads((tmp_path / "test_metrics.json").read_text())
    assert line == {"step": 3, "epoch": 3, "iter": 9, "time": line["time"], "test/accuracy": 0.75}
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"lr": 0.1, "name": "ü"}
    assert not (tmp_path / "scalars.jsonl").exists()


@pytest.mark.parametrize("name", ["test_metrics.json", "config.json"])
def test_a_symbolic_link_is_replaced_by_a_small_file(writer, tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    writer.write_config({"lr": 0.5})
    writer.write_scalars({"test/accuracy": 0.5}, 1, Where("test", epoch=1, iter=3))
    writer.flush()
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((tmp_path / name).read_text())


def test_sync_calls_fsync_after_flushing(writer, tmp_path, monkeypatch):
    synced = []
    writer.write_scalars({"train/loss": 0.5}, 1, AT)
    path = tmp_path / "scalars.jsonl"
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, path.stat().st_size)))
    writer.sync()
    assert synced == [(path.stat().st_ino, len(path.read_bytes()))]
    assert path.read_bytes()


def test_the_configuration_is_written_without_secrets(tmp_path):
    config = {"lr": 0.1, "wandb": {"api_key": "abc"}, "store": "s3://ada:abc@host/x", "hooks": [{"to": "https://host/abc"}]}
    logging_loop(JSONLinesWriter(), work_dir=tmp_path, config=config).run()
    text = (tmp_path / "config.json").read_text()
    assert "abc" not in text
    assert json.loads(text)["lr"] == 0.1
