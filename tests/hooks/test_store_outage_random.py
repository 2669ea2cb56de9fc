"""A store that fails at random, in runs that end, crash and resume: pointers name what is there, and nothing is lost."""

import random

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from trainbus.eventloop import CheckpointError
from trainbus.eventloop.checkpoint import verify
from trainbus.hooks import CheckpointHook

from .conftest import batches, files, make_loop

SESSIONS = 4
"""In the last one the store is well."""


class CrashError(Exception):
    pass


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_fails_at_random_has_everything_in_the_end(tmp_path, memory, monkeypatch, seed, there):
    draw = random.Random(seed)
    scores = [round(draw.random(), 3) for _ in range(40)]
    keep, faults = draw.choice([1, 2, 3]), [0.0]
    real, real_remove = MemoryFile.commit, MemoryFileSystem.rm_file

    def commit(self):
        if self.getbuffer().nbytes and draw.random() < faults[0]:
            if draw.random() < 0.5:
                real(self)  # and its answer is lost
            raise OSError(5, "no answer")
        if self.getbuffer().nbytes or not faults[0]:  # an object store shows no file that is not complete
            real(self)

    def remove(self, path):
        if draw.random() < faults[0]:
            raise OSError(5, "not removed")
        real_remove(self, path)

    monkeypatch.setattr(MemoryFile, "commit", commit)
    monkeypatch.setattr(MemoryFileSystem, "rm_file", remove)

    class Score:
        def update(self): ...
        def reset(self): ...
        def compute(self):
            return scores[loop.counters.epoch]

    def look(event):
        if (pointer := memory.store.get("/bucket/run/last_checkpoint")) is not None:
            assert f"/bucket/run/{pointer.getvalue().decode()}" in memory.store

    epochs = 0
    for session in range(SESSIONS):
        well = session == SESSIONS - 1
        epochs += draw.randint(1, 4)
        hook = CheckpointHook(
            1, out_dir="memory://bucket", max_keep_ckpts=keep, save_best="acc", on_error=draw.choice(["raise", "log"])
        )
        options = {"val_data": batches(1), "metrics": {"acc": Score()}, "sanity": 0, "max_epochs": epochs}
        loop = make_loop(hook, work_dir=tmp_path / "run", **options)
        crash = None if well or draw.random() < 0.6 else epochs * 4 - 3

        def go_on(event, well=well, crash=crash):
            faults[0] = 0.0 if well else draw.choice([0.1, 0.9])
            if crash is not None and event.progress.iter >= crash - 1:
                raise CrashError

        loop.bus.on("before_train_epoch", go_on)
        for mount_point in ("checkpoint_uploaded", "checkpoint_failed", "checkpoint_skipped"):
            loop.bus.on(mount_point, look)
        faults[0] = 0.0  # a run does not begin without an answer
        try:
            loop.run(resume="auto" if session else None)
        except (CheckpointError, CrashError):
            assert not well
        if (pointer := tmp_path / "run/last_checkpoint").exists():
            assert (tmp_path / "run" / pointer.read_text()).exists()
    best = max(range(1, epochs + 1), key=lambda epoch: scores[epoch])
    assert {f"epoch_{epochs}", f"best_acc_epoch_{best}", "last_checkpoint"} <= there()
    assert files(tmp_path / "run") <= {f"epoch_{epochs}", f"best_acc_epoch_{epochs}"}
    for name in (f"epoch_{epochs}", f"best_acc_epoch_{best}"):
        verify(f"memory://bucket/run/{name}.safetensors")
