"""``TrainbusCheckpointIO`` in Lightning itself: checkpoints that are written beside the training."""

import dataclasses
import enum
import inspect
import pickle
import re
import threading
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest
import structlog
import torch
from torch import nn

from trainbus import attach
from trainbus.bridges import TrainbusCheckpointIO
from trainbus.bridges.lightning import saver as lightning_saver
from trainbus.eventloop import Bus, CheckpointError
from trainbus.eventloop.checkpoint import symlink
from trainbus.eventloop.errors import CheckpointValueError
from trainbus.hooks import CheckpointHook
from trainbus.testing.host_job import assert_same, loader

from .conformance import WARNINGS

pl = pytest.importorskip("lightning.pytorch")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

from .test_lightning import trainer_of as plain  # noqa: E402 - skipped without Lightning

pytestmark = WARNINGS
FULL = {"weights_only": False} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}  # since 2.6


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Size:
    width: int = 3


SIZE, OPTIONS = Size(), Namespace(lr=0.1)


class Module(pl.LightningModule):
    def __init__(self, width=8, where=Path("data"), color=Color.RED, size=SIZE, options=OPTIONS):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(0))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer_of(folder, *calls, plugin=None, **options):
    plugins = [TrainbusCheckpointIO() if plugin is None else plugin]
    return plain(folder, callbacks=list(calls), plugins=plugins, enable_checkpointing=bool(calls), **options)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_files_are_those_of_lightning_and_load_without_trainbus(tmp_path):
    for name, plugin in (("own", None), ("theirs", pl.plugins.io.TorchCheckpointIO())):
        saver = callbacks.ModelCheckpoint(tmp_path / name, filename="one", save_last=True)
        trainer_of(tmp_path, saver, plugin=plugin).fit(module := Module(width=5), loader())
    assert names(tmp_path / "own") == names(tmp_path / "theirs") == ["last.ckpt", "one.ckpt"]
    file = tmp_path / "own" / "one.ckpt"
    own, theirs = (torch.load(one, weights_only=False) for one in (file, tmp_path / "theirs" / "one.ckpt"))
    assert own.keys() == theirs.keys()
    assert_same(own["state_dict"], theirs["state_dict"])
    assert own["hyper_parameters"] == theirs["hyper_parameters"]
    assert own["loops"] == theirs["loops"]
    states = [one["optimizer_states"][0]["state"] for one in (own, theirs)]
    assert states[0].keys() == states[1].keys()
    for index in states[0]:
        assert_same(states[0][index], states[1][index])
    archive = ZipFile(file)
    pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert b"lightning" in pickled
    assert not re.search(b"eventloop|trainbus", pickled)  # no class of ours is needed to read it
    plain = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert type(plain.strategy.load_checkpoint(file, **FULL)) is type(own)
    loaded = Module.load_from_checkpoint(file, weights_only=False)
    assert loaded.hparams == module.hparams
    assert_same(loaded.state_dict(), module.state_dict())


class Versioned(nn.Linear):
    _version = 3


def test_the_versions_of_modules_are_in_a_checkpoint_with_a_bus(tmp_path):
    trainer = trainer_of(tmp_path, callbacks.ModelCheckpoint(tmp_path, filename="one"))
    module = Module()
    module.net = nn.Sequential(Versioned(4, 1), nn.Flatten(0))
    with attach(Bus(), trainer):
        trainer.fit(module, loader())
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]
    assert saved._metadata == module.state_dict()._metadata


def test_a_checkpoint_is_removed_and_a_link_is_moved_behind_the_commit_of_its_successor(tmp_path, disk):
    seen = []

    def look(trainer, *_):
        last = tmp_path / "c" / "last.ckpt"
        found = names(tmp_path / "c") if (tmp_path / "c").exists() else []
        seen.append([name for name in found if name.endswith(".ckpt")])
        assert not last.is_symlink() or last.exists()  # it never names a missing file
        if trainer.global_step == 3:
            disk.go.set()
            trainer.strategy.checkpoint_io.wait()
            disk.go.clear()
        if trainer.global_step == 7:
            disk.go.set()

    saver = callbacks.ModelCheckpoint(tmp_path / "c", filename="{step}", every_n_train_steps=2, save_last="link", save_top_k=1)
    trainer_of(tmp_path, saver, callbacks.LambdaCallback(on_train_batch_start=look)).fit(Module(), loader())
    assert seen[5] == ["last.ckpt", "step=2.ckpt"]  # a successor is being written
    assert names(tmp_path / "c") == ["last.ckpt", "step=8.ckpt"]
    assert (tmp_path / "c" / "last.ckpt").readlink() == Path("step=8.ckpt")


def test_a_name_that_is_being_written_counts_as_taken(tmp_path, disk):
    when = {"monitor": "train_loss", "every_n_train_steps": 2, "save_top_k": -1}
    saver = callbacks.ModelCheckpoint(tmp_path / "c", filename="{epoch}", **when)
    look = callbacks.LambdaCallback(on_train_batch_start=lambda trainer, *_: trainer.global_step == 5 and disk.go.set())
    trainer_of(tmp_path, saver, look, max_epochs=1).fit(Module(), loader(6))
    assert names(tmp_path / "c") == ["epoch=0-v1.ckpt", "epoch=0-v2.ckpt", "epoch=0.ckpt"]
    steps = [torch.load(tmp_path / "c" / name, weights_only=False)["global_step"] for name in names(tmp_path / "c")]
    assert steps == [4, 6, 2]


def test_behind_a_save_that_failed_a_later_one_removes_and_links_nothing(tmp_path, monkeypatch):
    go, write = threading.Event(), lightning_saver._write

    def failing(pickled, around, staged, path):
        if path.name == "second.ckpt":
            go.wait(10)
            raise CheckpointError("the disk is full")
        return write(pickled, around, staged, path)

    monkeypatch.setattr(lightning_saver, "_write", failing)
    plugin, state = TrainbusCheckpointIO(), {"x": torch.ones(3)}
    first, second, link = (str(tmp_path / name) for name in ("first.ckpt", "second.ckpt", "last.ckpt"))
    plugin.save_checkpoint(state, first)
    plugin.wait()
    plugin.save_checkpoint(state, second)
    plugin.remove_checkpoint(first)
    plugin.after_commit(partial(symlink, second, link))
    plugin.save_checkpoint(state, tmp_path / "other.ckpt")  # of another callback, while the second one is being written
    go.set()
    with pytest.raises(CheckpointError, match="full"):
        plugin.teardown()
    assert names(tmp_path) == ["first.ckpt", "other.ckpt"]


def test_outside_of_fit_a_save_is_durable_when_it_returns(tmp_path, no_thread_is_left):
    trainer = trainer_of(tmp_path)
    for number in range(2):
        trainer.fit(module := Module(), loader())
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
        loaded = Module.load_from_checkpoint(tmp_path / f"{number}.ckpt", weights_only=False)
        assert_same(loaded.state_dict(), module.state_dict())


def test_a_value_that_cannot_be_pickled_and_storage_options_are_refused_at_the_first_save(tmp_path):
    class Unsaveable(Module):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"inner": [1, threading.Lock()]}

    with pytest.raises(CheckpointValueError, match=r"mine\.inner\.1"):
        trainer_of(tmp_path, callbacks.ModelCheckpoint(tmp_path / "c"), max_epochs=1).fit(Unsaveable(), loader())
    with pytest.raises(TypeError, match="storage_options"):
        TrainbusCheckpointIO().save_checkpoint({}, tmp_path / "c", storage_options={})


def test_a_strategy_that_writes_itself_is_warned_about(tmp_path, monkeypatch):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Sharded(SingleDeviceStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            Path(filepath).parent.mkdir(exist_ok=True)
            Path(filepath).write_bytes(pickle.dumps(1))

    with structlog.testing.capture_logs() as logs:
        trainer = trainer_of(tmp_path, callbacks.ModelCheckpoint(tmp_path / "c"), max_epochs=1, strategy=Sharded("cpu"))
        trainer.fit(Module(), loader())
    assert [one["strategy"] for one in logs if one.get("id") == "lightning-strategy-saves"] == ["Sharded"]


def test_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    trainer = trainer_of(tmp_path, callbacks.ModelCheckpoint("memory://lightning/c", filename="{epoch}"))
    trainer.fit(module := Module(), loader())
    assert fsspec.filesystem("memory").exists("/lightning/c/epoch=1.ckpt")
    assert not fsspec.filesystem("memory").exists("/lightning/c/epoch=0.ckpt")
    loaded = Module.load_from_checkpoint("memory://lightning/c/epoch=1.ckpt", weights_only=False)
    assert_same(loaded.state_dict(), module.state_dict())


def test_trainers_with_another_plugin_are_as_they_were(tmp_path):
    plugin = TrainbusCheckpointIO()
    for how in ("link", True):
        saver = callbacks.ModelCheckpoint(tmp_path / str(how), filename="{epoch}", save_last=how)
        trainer_of(tmp_path, saver, plugin=pl.plugins.io.TorchCheckpointIO()).fit(Module(), loader())
        assert names(tmp_path / str(how)) == ["epoch=1.ckpt", "last.ckpt"]
    assert not plugin.saves


@pytest.mark.long
def test_the_methods_of_lightning_are_its_own_again_behind_the_last_plugin(script):
    """The classes belong to the whole process. Here it is another one, because trainers of other tests may still be alive."""
    done = script("""
        import gc
        from lightning.pytorch import Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from trainbus import TrainbusCheckpointIO

        methods = lambda: [Trainer.save_checkpoint, ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint]
        before, plugins = methods(), [TrainbusCheckpointIO(), TrainbusCheckpointIO()]
        plugins.pop()
        trainer = Trainer(accelerator="cpu", logger=False, plugins=[plugins.pop()])
        gc.collect()
        changed = [one is not other for one, other in zip(before, methods())]
        del trainer
        gc.collect()
        print(changed, methods() == before)
    """)
    assert done.stdout == "[True, True, True] True\n", done


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_beside_a_bus_a_failed_save_is_told(tmp_path, disk, on_error):
    disk.go.set()
    disk.error = OSError("the disk is full")
    bus, told = Bus(), []
    bus.on("checkpoint_failed", lambda event: told.append(Path(event.path).name))
    bus.add(CheckpointHook(interval=3, by_epoch=False, save_last=False, on_error=on_error))
    attach(bus, trainer := trainer_of(tmp_path, max_epochs=1))
    with nullcontext() if on_error == "log" else pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(Module(), loader())
    assert told == ["iter_3.ckpt"]


def test_lightning_is_not_imported_with_trainbus(script):
    done = script(
        "import sys, trainbus; trainbus.TrainbusCheckpointIO; print({'lightning', 'pytorch_lightning'} & {*sys.modules})"
    )
    assert done.stdout == "set()\n", done


def test_a_removed_checkpoint_is_logged_also_a_folder(tmp_path):
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "file.ckpt").write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("folder.ckpt", "file.ckpt")]
    with structlog.testing.capture_logs() as logs:
        for path in paths:
            TrainbusCheckpointIO().remove_checkpoint(path)
    assert [one["path"] for one in logs] == paths
    assert names(tmp_path) == []
