import io
import math
import shutil
import threading

import pytest
import structlog
import torch

from eventloop import Bus, Run
from hooks import LoggerHook, TensorBoardWriter
from hooks.writers import RunFacts, Where

AT = Where("train", epoch=1, iter=3)


@pytest.fixture
def events(monkeypatch):
    """Reads a folder with TensorBoard's own reader."""
    names = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # Files of one second are read in the order of these numbers, as text: all shall have as many digits.
    monkeypatch.setattr(names, "_global_uid", type(names._global_uid)(1000))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(directory):
        return accumulator.EventAccumulator(str(directory), size_guidance={accumulator.SCALARS: 0}).Reload()

    return read


def scalars(found, tag):
    return [(event.step, event.value) for event in found.Scalars(tag)]


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
    writer.open(RunFacts("digits", tmp_path))
    writer.write_scalars({"train/loss": 0.5, "train/nan": math.nan, "train/inf": -math.inf}, 3, AT)
    writer.flush()
    found = events(tmp_path / "tb")
    assert scalars(found, "train/loss") == [(3, 0.5)]
    assert math.isnan(scalars(found, "train/nan")[0][1])
    assert scalars(found, "train/inf") == [(3, -math.inf)]
    writer.close()


def test_repeated_iterations_of_a_resumed_run_appear_once(events, tmp_path):
    writer = TensorBoardWriter()
    for first, last, loss in ((1, 6, 1.0), (4, 5, 2.0)):
        writer.open(RunFacts("digits", tmp_path))
        if first > 1:
            writer.write_scalars({"val/loss": loss}, 1, Where("val", epoch=1, iter=3))
        for step in range(first, last + 1):
            writer.write_scalars({"train/loss": loss}, step, Where("train", epoch=1, iter=step))
        writer.close()
    found = events(tmp_path / "tensorboard")
    assert scalars(found, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert scalars(found, "val/loss") == [(1, 2.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_removed_folder_is_created_again_for_later_data(events, logged, tmp_path):
    def remove(event):
        if event.progress.iter == 3:
            loop.bus.drain()
            shutil.rmtree(tmp_path / "tensorboard")

    before = set(threading.enumerate())
    loop = logged.loop(TensorBoardWriter(), work_dir=tmp_path, every=remove)
    with structlog.testing.capture_logs() as lines:
        loop.run()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # or its exception would be seen by a later test
    told = {line["event"] for line in lines if line["log_level"] != "debug"}
    assert told == {"a writer failed and will be tried again", "a writer works again"}
    assert scalars(events(tmp_path / "tensorboard"), "train/loss") == [(step, float(step)) for step in (4, 5, 6)]


def test_a_validation_alone_hides_no_training_scalars(events, tmp_path):
    writer = TensorBoardWriter()
    for stage, step in (("train", 1), ("train", 2), ("val", 0), ("test", 0)):
        writer.open(RunFacts("digits", tmp_path))
        writer.write_scalars({f"{stage}/loss": 0.5}, step, Where(stage, epoch=0, iter=step))
        writer.close()
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

    free, write = threading.Event(), RecordWriter.write

    def slow(self, data):
        free.wait()
        write(self, data)

    writer = TensorBoardWriter()
    writer.open(RunFacts("digits", tmp_path))
    monkeypatch.setattr(RecordWriter, "write", slow)
    for step in range(1, 5001):  # some twenty batches of the logger, while not one record gets to the disk
        writer.write_scalars({"train/loss": 0.5}, step, AT)
    free.set()
    writer.close()
    assert len(scalars(events(tmp_path / "tensorboard"), "train/loss")) == 5000
