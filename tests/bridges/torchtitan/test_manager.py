"""``TrainbusCheckpointManager`` in the place of torchtitan's own: a checkpoint has its name only when it is complete."""

import errno
import os
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from torch.distributed import checkpoint as dcp

pytest.importorskip("torchtitan.trainer")

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer import dcp as manager_of_titan
from torchtitan.config import ConfigManager

from trainbus import Bus, CheckpointHook, EMAHook, TrainbusCheckpointManager, attach
from trainbus.bridges.torchtitan import privates
from trainbus.convert.safetensors_folder import open_safetensors
from trainbus.eventloop import CheckpointError, ConfigurationError
from trainbus.eventloop.checkpoint import folder
from trainbus.testing.host_job import Counting, assert_same, checkpoints, noted

from ...scripts import run_script
from . import llama
from .conftest import only_process
from .job import WARNINGS

pytestmark = WARNINGS
OURS, THEIRS = TrainbusCheckpointManager, CheckpointManager
BESIDE = {"async_mode": "async"}


@pytest.fixture
def make(make):
    """Return a function that makes a trainer with our checkpoints, in a folder by name."""
    return lambda name="run", **options: make(name, **({"manager": OURS} | options))


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    """The weights of a training that was never interrupted."""
    with only_process():
        trainer = llama.make(tokenizer, tmp_path_factory.mktemp("whole"), steps=8, enable=False)
        trainer.train()
        return llama.weights(trainer)


def names(folder):
    """The names in the folder of checkpoints."""
    return sorted(path.name for path in folder.joinpath("checkpoint").iterdir())


# ------------------------------------------------------------------------------------------------------------- a round trip


@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)])
@pytest.mark.parametrize("mode", [{}, BESIDE], ids=["in line", "beside"])
def test_each_manager_goes_on_from_the_checkpoints_of_the_other(make, whole, first, second, mode):
    begun = make(steps=5, manager=first, **mode)
    begun.train()
    begun.close()
    trainer = make(steps=8, manager=second, **mode)
    trainer.train()
    trainer.close()
    assert_same(llama.weights(trainer), whole)


def test_torchtitans_own_reader_of_one_file_reads_it(make, tmp_path):
    trainer = make(steps=2)
    trainer.train()
    stored = {name: torch.empty_like(one) for name, one in llama.weights(trainer).items()}
    dcp.load(stored, checkpoint_id=str(tmp_path / "run/checkpoint/step-2"), no_dist=True)
    assert_same(stored, llama.weights(trainer))


def test_a_command_line_that_names_its_configuration_builds_it():
    path = f"{__name__.rpartition('.')[0]}.configured"
    config = ConfigManager().parse_args(["--module", path, "--config", "ours", "--checkpoint.interval", "3"])
    assert type(config.checkpoint) is OURS.Config
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (3, 5)


# ------------------------------------------------------------------------------------------------------------------ a kill

_KILLED = """
import os, signal, sys
from pathlib import Path
from torch import distributed
from tests.bridges.torchtitan import llama, test_manager

owner, name, when, mode = sys.argv[3:]
os.environ["LOCAL_RANK"] = "0"
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
trainer = llama.make(Path(sys.argv[1]), Path(sys.argv[2]), steps=8, manager=test_manager.OURS, async_mode=mode)
module, _, inner = owner.partition(":")
module = __import__(module, fromlist=["it"])
place = getattr(module, inner) if inner else module
original, saves = getattr(place, name), []
manager_save = trainer.checkpointer.dcp_save

def counted(*args, **options):
    saves.append(None)
    return manager_save(*args, **options)

def killing(*args, **options):
    second = len(saves) == 2
    if second and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **options)
    if second and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(place, name, killing)
trainer.checkpointer.dcp_save = counted
trainer.train()
"""
_WRITER, _COMMIT = "torch.distributed.checkpoint:FileSystemWriter", "trainbus.eventloop.checkpoint.folder"
MOMENTS = [
    (_WRITER, "write_data", "before", 2),
    ("os", "fsync", "before", 2),  # a file of tensors has been written
    (_WRITER, "finish", "before", 2),
    (_WRITER, "finish", "after", 2),  # the folder is complete, but not checked
    (_COMMIT, "sync_folder", "after", 2),
    (_COMMIT, "_set_aside", "before", 2),
    ("trainbus.bridges.torchtitan.folders", "commit_folder", "after", 4),
]


@pytest.mark.parametrize(
    ("owner", "name", "when", "step", "mode"),
    [*((*moment, "disabled") for moment in MOMENTS), *((*MOMENTS[at], "async") for at in (0, 3, 6))],
)
def test_a_process_killed_in_a_save_goes_on_from_the_last_complete_one(
    make, tokenizer, tmp_path, whole, owner, name, when, step, mode
):
    again = name == "_set_aside"  # only where a folder of that name is replaced
    if again:
        half = tmp_path / "run/checkpoint/step-4"
        half.mkdir(parents=True)
        (half / "__0_0.distcp").write_bytes(b"of a killed training with torchtitan's own manager")
    killed = run_script(_KILLED, tmp_path, arguments=[tokenizer, tmp_path / "run", owner, name, when, mode])
    assert killed.returncode == -9, killed.stderr
    assert [one for one in names(tmp_path / "run") if one[0] != "."] == ["step-2", *["step-4"] * (step == 4 or again)]
    trainer = make(steps=8, async_mode=mode)
    found = []
    trainer.checkpointer.dcp_load = partial(_noting, found, trainer.checkpointer.dcp_load)
    trainer.train()
    trainer.close()
    assert found == [str(tmp_path / f"run/checkpoint/step-{step}")]
    assert_same(llama.weights(trainer), whole)
    assert names(tmp_path / "run") == ["step-2", "step-4", "step-6", "step-8"]


def _noting(found, load, state, checkpoint_id, **options):
    found.append(checkpoint_id)
    return load(state, checkpoint_id, **options)


# --------------------------------------------------------------------------------------------------------------- a failure


@pytest.fixture
def full(monkeypatch):
    """Return a function that fills the disk for the next save."""

    def fill(owner=dcp.FileSystemWriter, name="write_data"):
        def fail(*args, **options):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(owner, name, fail)

    return fill


def at_step(trainer, step, call):
    """Have a trainer call a function before the save of a step."""
    save = trainer.checkpointer.save

    def saving(curr_step, **options):
        if curr_step == step:
            trainer.checkpointer.maybe_wait_for_saving()
            call()
        return save(curr_step, **options)

    trainer.checkpointer.save = saving


@pytest.mark.parametrize("mode", [{}, BESIDE], ids=["in line", "beside"])
@pytest.mark.parametrize("place", ["data", "folder"])
@pytest.mark.parametrize("bus", [True, False], ids=["bus", "bare"])
def test_a_full_disk_ends_the_training_and_leaves_the_checkpoints_before(make, tmp_path, full, mode, place, bus):
    trainer, told = make(**mode), []
    at_step(trainer, 4, full if place == "data" else partial(full, folder.platform, "sync_directory"))
    if bus:
        told = noted(hooks := Bus(), "checkpoint_failed", "path")
        attach(hooks, trainer)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.train()
    trainer.close()
    assert names(tmp_path / "run") == ["step-2"]
    assert told == [str(tmp_path / "run/checkpoint/step-4")] * bus


@pytest.mark.parametrize("mode", [{}, BESIDE], ids=["in line", "beside"])
def test_a_folder_that_its_reader_would_refuse_gets_no_name(make, tmp_path, monkeypatch, mode):
    finish = dcp.FileSystemWriter.finish

    def lost(self, *args, **options):
        finish(self, *args, **options)
        file = next(Path(self.path).glob("*.distcp"))
        os.truncate(file, file.stat().st_size // 2)

    trainer = make(**mode)
    at_step(trainer, 4, lambda: monkeypatch.setattr(dcp.FileSystemWriter, "finish", lost))
    with pytest.raises(CheckpointError, match=r"cannot write .*step-4"):
        trainer.train()
    trainer.close()
    assert names(tmp_path / "run") == ["step-2"]


def test_the_end_of_a_trainer_waits_for_its_last_save(make, tmp_path):
    trainer = make(steps=1000, interval=3, **BESIDE, training={"local_batch_size": 8})
    trainer.dataloader.dataset.infinite = False
    trainer.train()
    last = (trainer.step - 1) // 3 * 3  # the data ended in a step that was not made
    trainer.close()
    assert f"step-{last}" in names(tmp_path / "run")


def test_a_load_waits_for_the_save_that_is_being_written(make, monkeypatch):
    go, finish = Event(), dcp.FileSystemWriter.finish
    monkeypatch.setattr(dcp.FileSystemWriter, "finish", lambda *args, **options: go.wait(60) and finish(*args, **options))
    manager = make(**BESIDE).checkpointer
    manager.save(2)
    wait = manager.maybe_wait_for_saving
    manager.maybe_wait_for_saving = lambda: (go.set(), wait())
    assert manager.load()
    manager.close()


# -------------------------------------------------------------------------------------------------------------- its options


@pytest.mark.parametrize(("mode", "kept"), [({}, ["step-6", "step-8"]), (BESIDE, ["step-4", "step-6", "step-8"])])
def test_old_checkpoints_are_removed_after_new_ones_have_their_names(make, tmp_path, mode, kept):
    trainer = make(steps=9, keep_latest_k=2, **mode)
    trainer.train()
    trainer.close()
    assert names(tmp_path / "run") == [*kept, "step-9"]


def test_a_step_that_is_saved_again_replaces_the_former_folder(make, tmp_path, whole):
    make(steps=6, manager=THEIRS, last_save_model_only=True).train()
    trainer = make(steps=8, load_step=4)
    trainer.train()
    again = make(steps=8, load_step=6)
    again.train()
    assert_same(llama.weights(again), whole)
    assert names(tmp_path / "run") == ["step-2", "step-4", "step-6", "step-8"]


def test_a_store_is_refused(make):
    with pytest.raises(ConfigurationError, match="memory://saves"):
        make(folder="memory://saves")


def test_a_manager_that_is_switched_off_saves_nothing(make, tmp_path):
    trainer = make(enable=False)
    trainer.train()
    trainer.close()
    assert not (tmp_path / "run/checkpoint").exists()


@pytest.mark.parametrize("path", privates.MANAGER_NAMES)
def test_a_version_without_a_method_is_an_error(path):
    others = {one.partition(".")[2]: None for one in privates.MANAGER_NAMES if one != path}
    with pytest.raises(ConfigurationError, match=path.partition(".")[2]):
        privates.check_manager(type("CheckpointManager", (), others))


# ---------------------------------------------------------------------------------------------------------------- with a bus


@pytest.mark.parametrize("mode", [{}, BESIDE], ids=["in line", "beside"])
def test_the_state_of_a_bus_is_in_its_checkpoints(make, tmp_path, whole, mode):
    def run(name, steps):
        bus = Bus(hook := Counting(), ema := EMAHook(momentum=0.1), CheckpointHook(3, by_epoch=False))
        told, loaded = checkpoints(bus), noted(bus, "after_load_checkpoint", "path")
        trainer = make(name, steps=steps, **mode)
        attach(bus, trainer)
        trainer.train()
        trainer.close()
        averages = {key: one.full_tensor().clone() for key, one in ema.average.tensors.items()}
        return trainer, hook, averages, [path.name for path in told], loaded

    *_, counted, average, _, _ = run("straight", 8)
    *_, told, _ = run("cut", 5)
    trainer, hook, averages, _, loaded = run("cut", 8)
    assert told == ["step-2", "iter_3", "step-4", "step-5", "iter_5"]
    assert loaded == [str(tmp_path / "cut/iter_5")]
    assert_same(llama.weights(trainer), whole)
    assert_same(averages, average)
    assert hook.iters == counted.iters


# ------------------------------------------------------------------------------------------------------- Hugging Face's format


@pytest.mark.parametrize("several", [False, True], ids=["one file", "several files"])
def test_a_last_save_in_the_format_of_hugging_face_has_its_name_when_it_is_complete(make, tmp_path, several):
    trainer = make(steps=2, last_save_model_only=True, last_save_in_hf=True)
    adapter, model = trainer.checkpointer.sd_adapter, llama.weights(trainer)
    if several:
        adapter.fqn_to_index_mapping = {name: 1 + place % 2 for place, name in enumerate(adapter.to_hf(model))}
    trainer.train()
    expected = adapter.to_hf(llama.weights(trainer))
    contents = open_safetensors(tmp_path / "run/checkpoint/step-2")
    assert_same({name: contents.read(one) for name, one in contents.tree.items()}, expected)
    again = make("again", initial_load_path=str(tmp_path / "run/checkpoint/step-2"), initial_load_in_hf=True)
    again.checkpointer.load()
    assert_same(llama.weights(again), llama.weights(trainer))


def test_a_last_save_in_the_format_of_hugging_face_without_a_file_gets_no_name(make, tmp_path, monkeypatch):
    trainer = make(steps=2, last_save_model_only=True, last_save_in_hf=True)
    adapter = trainer.checkpointer.sd_adapter
    adapter.fqn_to_index_mapping = {name: 1 + place % 2 for place, name in enumerate(adapter.to_hf(llama.weights(trainer)))}
    consolidate = manager_of_titan.consolidate_safetensors_files_on_every_rank

    def lost(output_dir, **options):
        consolidate(output_dir=output_dir, **options)
        next(Path(output_dir).glob("model-00002-*")).unlink()

    monkeypatch.setattr(manager_of_titan, "consolidate_safetensors_files_on_every_rank", lost)
    with pytest.raises(CheckpointError, match="model-00002"):
        trainer.train()
    assert names(tmp_path / "run") == []
