import io
import threading

import pytest
import torch

from trainbus.eventloop import Bus, Run
from trainbus.hooks import LoggerHook, TensorBoardWriter
from trainbus.hooks.writers import RunFacts, Where

from .conftest import write
from .readers import scalars


def test_tensorboard_reads_logged_data(events, tmp_path):
    bus = Bus(LoggerHook(interval=1, interval_exp_name=4, writers=[TensorBoardWriter()]))
    with Run(bus, model=torch.nn.Linear(1, 1), work_dir=tmp_path / "digits", config={"lr": 0.5}) as run:
        for epoch in run.epochs(2):
            for batch in run.train(range(3)):
                run.report(loss=torch.tensor(epoch + batch / 4), lr=0.5)
    found = events(tmp_path / "digits" / "tensorboard")
    assert set(found.Tags()["scalars"]) == {"train/loss", "train/lr"}
    assert scalars(found, "train/loss") == [(1, 0.0), (2, 0.25), (3, 0.5), (4, 1.0), (5, 1.25), (6, 1.5)]
    assert scalars(found, "train/lr") == [(step, 0.5) for step in range(1, 7)]
    (config,) = found.Tensors("config/text_summary")
    assert b'"lr": 0.5' in config.tensor_proto.string_val[0]
    (name,) = found.Tensors("experiment/text_summary")
    assert (name.step, name.tensor_proto.string_val[0]) == (4, b"digits")


def test_scalars_are_readable_after_a_flush(events, tmp_path):
    writer = TensorBoardWriter("tb")
    write(writer, tmp_path, (3, {"train/loss": 0.5}), close=False)
    assert scalars(events(tmp_path / "tb"), "train/loss") == [(3, 0.5)]
    writer.close()


def test_repeated_iterations_of_a_resumed_run_appear_once(events, tmp_path):
    writer = TensorBoardWriter()
    write(writer, tmp_path, *((step, {"train/loss": 1.0}) for step in range(1, 7)))
    write(writer, tmp_path, (1, {"val/loss": 2.0}), *((step, {"train/loss": 2.0}) for step in (4, 5)))
    found = events(tmp_path / "tensorboard")
    assert scalars(found, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert scalars(found, "val/loss") == [(1, 2.0)]


def test_a_validation_alone_hides_no_training_scalars(events, tmp_path):
    for stage, step in (("train", 1), ("train", 2), ("val", 0), ("test", 0)):
        write(TensorBoardWriter(), tmp_path, (step, {f"{stage}/loss": 0.5}))
    assert scalars(events(tmp_path / "tensorboard"), "train/loss") == [(1, 0.5), (2, 0.5)]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_readable(events, tmp_path, channels):
    pillow = pytest.importorskip("PIL.Image")
    writer = TensorBoardWriter()
    writer.open(RunFacts("digits", tmp_path))
    writer.write_image("val/samples", torch.full((2, 5, channels), 7, dtype=torch.uint8).numpy(), 3)
    writer.close()
    found = events(tmp_path / "tensorboard")
    (image,) = found.Images("val/samples")
    picture = pillow.open(io.BytesIO(image.encoded_image_string))
    assert (image.step, picture.size) == (3, (5, 2))
    assert picture.getpixel((0, 0)) == (7,) * max(3, channels)  # TensorBoard makes grey RGB


def test_a_batch_of_scalars_does_not_wait_for_the_disk(events, tmp_path, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    free, put = threading.Event(), RecordWriter.write
    writer = TensorBoardWriter()
    write(writer, tmp_path, close=False)
    monkeypatch.setattr(RecordWriter, "write", lambda self, data: (free.wait(), put(self, data)))
    for step in range(1, 5001):  # some twenty batches of the logger, while not one record gets to the disk
        writer.write_scalars({"train/loss": 0.5}, step, Where("train", epoch=1, iter=3))
    free.set()
    writer.close()
    assert len(scalars(events(tmp_path / "tensorboard"), "train/loss")) == 5000
