import json
import math
import shutil
import struct
import time
import zlib
from pathlib import Path

import pytest
import structlog
import torch

from hooks import WandbWriter
from hooks.writers import RunFacts, Where

from ...failing import fails

pytestmark = [pytest.mark.usefixtures("offline")]


@pytest.fixture
def wandb():
    return pytest.importorskip("wandb")


def records(path):
    """Read a .wandb file with W&B's own messages, up to the end of its run, which W&B's process writes in its own time."""
    while True:
        found = whole(path.read_bytes())
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.02)


def whole(data):
    """The messages in a file framed as LevelDB's log is: blocks of 32 KiB; checksum, length, kind, data."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] == b":W&B"
    offset, message, found = 7, b"", []
    while offset < len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        if len(data) < offset + 7:
            break
        checksum, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        part = data[offset + 7 : offset + 7 + length]
        if len(part) < length:
            break
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        message, offset = message + part, offset + 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(message))
            message = b""
    return found


def files(work_dir):
    return sorted(Path(work_dir).glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def rows(path):
    """The history: one mapping of names to values for each step."""
    kept = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{("/".join(item.nested_key) or item.key): json.loads(item.value_json) for item in history.item} for history in kept]


def column(found, name):
    return [(row["_step"], row[name]) for row in found if name in row]


def exits(path):
    return [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]


def test_logged_data_and_images_are_readable_from_the_wandb_file(wandb, logged, tmp_path):
    from PIL import Image

    def report(event):
        if event.progress.iter == 1:
            event.run.report_image("noise", torch.ones(3, 2, 5))
            event.run.report_image("grey", torch.zeros(2, 5))

    config = {"lr": 0.1, "model": {"depth": 3}}
    logged.loop(WandbWriter("digits"), work_dir=tmp_path, name="first", config=config, every=report).run()
    (path,) = files(tmp_path)
    found = rows(path)
    assert column(found, "train/loss") == [(step, float(step)) for step in range(1, 7)]
    assert column(found, "train/step") == [(step, step) for step in range(1, 7)]
    assert column(found, "val/accuracy") == [(3, 0.75), (6, 1.0)]
    assert column(found, "val/step") == [(3, 1), (6, 2)]
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("digits", "first")
    assert exits(path) == [0]
    updates = {item.key or "/".join(item.nested_key): item for record in records(path) for item in record.config.update}
    assert [json.loads(updates[name].value_json) for name in ("lr", "model")] == [0.1, {"depth": 3}]
    ((step, image),) = column(found, "train/noise/path")
    assert step == 2
    picture = Image.open(path.parent / "files" / image)
    assert (picture.size, picture.getpixel((0, 0))) == ((5, 2), (255, 255, 255))
    assert [step for step, _ in column(found, "train/grey/path")] == [2]


def test_nan_and_infinities_are_kept(wandb, tmp_path):
    writer = WandbWriter()
    writer.open(RunFacts("digits", tmp_path))
    values = [math.nan, math.inf, -math.inf, 1 / 3]
    for step, value in enumerate(values, 1):
        writer.write_scalars({"train/loss": value}, step, Where("train", epoch=1, iter=step))
    writer.close()
    found = [float(value) for _, value in column(rows(files(tmp_path)[0]), "train/loss")]
    assert math.isnan(found[0])
    assert found[1:] == values[1:]


def test_a_resumed_run_keeps_its_id_and_continues_its_steps(wandb, tmp_path):
    for step in (1, 2):
        writer = WandbWriter()
        writer.open(RunFacts("digits", tmp_path))
        writer.write_scalars({"train/loss": 0.5, f"train/{step}": 1.0}, step, Where("train", epoch=1, iter=step))
        writer.close()
    first, second = files(tmp_path)
    assert first.name == second.name == f"run-{(tmp_path / 'wandb' / 'run_id').read_text().strip()}.wandb"
    assert column(rows(first), "train/loss") == [(1, 0.5)]
    assert column(rows(second), "train/loss") == [(2, 0.5)]


def test_a_removed_folder_is_created_again_for_later_data(wandb, logged, tmp_path):
    def remove(event):
        if event.progress.iter == 3:
            loop.bus.drain()
            shutil.rmtree(tmp_path / "wandb")

    loop = logged.loop(WandbWriter(), work_dir=tmp_path, every=remove)
    with structlog.testing.capture_logs() as lines:
        loop.run()
    assert "a writer works again" in [line["event"] for line in lines]
    (path,) = files(tmp_path)
    assert column(rows(path), "train/loss")[-3:] == [(step, float(step)) for step in (4, 5, 6)]


def test_two_runs_within_a_second_have_separate_folders(wandb, logged, tmp_path):
    loop = logged.loop(WandbWriter(), work_dir=tmp_path)
    loop.run()
    loop.val()
    first, second = files(tmp_path)
    assert len(column(rows(first), "train/loss")) == 6
    assert [value for _, value in column(rows(second), "val/accuracy")] == [1.25]


def test_an_aborted_run_is_marked_as_failed(wandb, logged, tmp_path):
    loop = logged.loop(WandbWriter(), work_dir=tmp_path, every=fails(ValueError("no")))
    loop.bus.abort_timeout = 25.0  # on a busy machine it takes longer than the default to begin
    with pytest.raises(ValueError, match="no"):
        loop.run()
    assert exits(files(tmp_path)[0]) == [1]


def test_the_users_own_wandb_run_is_not_changed(wandb, tmp_path):
    writer = WandbWriter()
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True)) as mine:
        writer.open(RunFacts("digits", tmp_path / "run"))
        assert wandb.run is mine
        writer.close()
        mine.log({"a": 1})
