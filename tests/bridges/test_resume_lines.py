"""A training in another trainer that is interrupted tells how to continue it, in the words of that trainer."""

import importlib
import time

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, TrainbusCheckpointIO
from hooks import CheckpointHook

from .jobs import batches


def lightning(bus, folder, *, beside=False):
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    plugins = [TrainbusCheckpointIO()] if beside else []
    trainer = pl.Trainer(default_root_dir=folder, max_epochs=2, accelerator="cpu", plugins=plugins, **quiet)
    bus.attach(trainer)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))


def transformers(bus, folder, *, beside=False):
    pytest.importorskip("transformers")
    from .conformance.transformers import make

    trainer = make(folder)
    bus.attach(trainer, checkpoints=beside)
    trainer.train()


def ignite(bus, folder):
    engine = pytest.importorskip("ignite.engine")
    model = nn.Linear(4, 3)
    trainer = engine.create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    bus.attach(trainer, work_dir=folder)
    trainer.run(batches(4), max_epochs=2)


JOBS = {
    "lightning": (lightning, "iter_2.ckpt", 'trainer.fit(..., ckpt_path="{}")'),
    "transformers": (transformers, "iter_2", 'trainer.train(resume_from_checkpoint="{}")'),
    "ignite": (ignite, "iter_2.pt", 'Checkpoint.load_objects(bridge.to_save, "{}")'),
}


def told(job, folder, *, interval=2, **options):
    """Return the last line of the log of a training that Ctrl-C ends in its third iteration."""
    bus = Bus(CheckpointHook(interval=interval, by_epoch=False))
    bus.on("before_train_iter", lambda event: ctrl_c(), when=lambda event: event.progress.iter == 2)
    with capture_logs() as logs, pytest.raises((KeyboardInterrupt, SystemExit)):
        job(bus, folder, **options)
    return logs[-1]["event"] if logs else ""


def ctrl_c():
    raise KeyboardInterrupt


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec")


@pytest.mark.parametrize("host", JOBS)
def test_ctrl_c_tells_how_to_continue_in_the_words_of_the_trainer(tmp_path, host):
    job, name, way = JOBS[host]
    path = tmp_path / name
    assert told(job, tmp_path).endswith(f"continue from {path} with {way.format(path)}")


@pytest.mark.parametrize("host", JOBS)
def test_a_run_that_has_no_checkpoint_tells_of_none(tmp_path, host):
    assert "continue from" not in told(JOBS[host][0], tmp_path, interval=5)


@pytest.mark.parametrize("host", ["lightning", "transformers"])
def test_a_file_that_is_written_beside_the_training_is_waited_for(tmp_path, monkeypatch, host):
    job, name, _ = JOBS[host]
    saver = importlib.import_module(f"eventloop.bridges.{host}.saver")
    write = saver._write

    def write_slowly(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(saver, "_write", write_slowly)
    assert f"continue from {tmp_path / name} with" in told(job, tmp_path, beside=True)
