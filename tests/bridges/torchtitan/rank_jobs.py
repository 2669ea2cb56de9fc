"""Trainings of torchtitan in two processes that share a model by FSDP2."""

import errno
import os
import warnings
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from torch import distributed
from torch.distributed import checkpoint as dcp

from trainbus import Bus, CheckpointHook, EMAHook, attach
from trainbus.eventloop import CheckpointError
from trainbus.testing.host_job import Counting, fails, noted


def train(tokenizer, folder):
    """Train without a bus, with one, to a failure and from there, and until one rank stops; return what is to compare."""
    rank = distributed.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    from . import llama

    files, seen = Path(folder), {}

    def run(name, *, fails_at=None, stops_at=None, bus=True, **options):
        trainer = llama.make(Path(tokenizer), files / name, steps=8, **options)
        hook, ema, hooks, paths = Counting(), EMAHook(momentum=0.1), Bus(), []
        if bus:
            hooks.add(hook, ema, *[CheckpointHook(2, by_epoch=False)] * (name != "own"))
            hooks.on("checkpoint_committed", lambda event: paths.append(Path(event.path).name))
            if fails_at is not None:
                hooks.on("after_train_iter", fails(KeyError), when=lambda event: event.progress.iter == fails_at)
            if stops_at is not None and rank == 1:
                hooks.on("after_train_iter", lambda event: event.run.stop("enough"), once=stops_at)
            loaded = noted(hooks, "after_load_checkpoint", "path")
            losses = noted(hooks, "after_train_iter", "outputs")
            attach(hooks, trainer)
        with suppress(KeyError):
            trainer.train()
        found = {"weights": llama.weights(trainer), "step": trainer.step}
        if bus:
            averages = {key: one.full_tensor().clone() for key, one in ema.average.tensors.items()}
            found |= {"averages": averages, "hook": hook.seen, "loaded": list(loaded), "committed": paths}
            found |= {"losses": [float(one["loss"]) for one in losses]}
            found |= {"logged": [float(one["global_avg_loss"]) for one in losses if "global_avg_loss" in one]}
        seen[name] = found

    run("plain", bus=False)
    run("whole", metrics={"log_freq": 1})
    for name, only in (("hook", {"load_only": True}), ("own", {})):
        run(name, fails_at=4, **only)
        seen[f"{name}, cut"] = seen[name]
        run(name, **only)
    run("stops", stops_at=3)
    return seen


def save(tokenizer, folder):
    """Train with our checkpoints to a failure of the disk of one rank, and from there; return what is to compare."""
    rank = distributed.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    from torchtitan.components.checkpoint import CheckpointManager

    from trainbus import TrainbusCheckpointManager
    from trainbus.bridges.torchtitan import folders

    from . import llama

    files, seen = Path(folder), {}

    def run(name, *, full=None, hooks=(), **options):
        trainer = llama.make(Path(tokenizer), files / name, steps=8, **{"manager": TrainbusCheckpointManager, **options})
        if hooks:
            attach(Bus(*hooks), trainer)
        error, filled = "", []

        def fail(*args, **kwargs):
            raise OSError(errno.ENOSPC, "the disk is full")

        def stepping(data):
            if trainer.step == 4 and full is not None and rank == full[0]:
                trainer.checkpointer.maybe_wait_for_saving()
                filled.append(patch.object(*full[1], fail))
                filled[0].start()
            step(data)

        step, trainer.train_step = trainer.train_step, stepping
        try:
            trainer.train()
            trainer.close()
        except CheckpointError as failure:
            error = str(failure)
        for one in filled:
            one.stop()
        distributed.barrier()  # the first rank removes what it has not named
        names = sorted(path.name for path in (files / name).glob("[!.]*/") if path.name not in ("checkpoint", "logs"))
        own = sorted(path.name for path in (files / name).glob("checkpoint/*"))
        return {"weights": llama.weights(trainer), "error": error, "names": names, "own": own}

    data, rename = (dcp.FileSystemWriter, "write_data"), (folders, "commit_folder")
    seen["plain"] = run("plain", enable=False)
    for mode in ("disabled", "async"):
        seen[mode, "data"] = run(f"{mode} data", full=(1, data), async_mode=mode)
        seen[mode, "rename"] = run(f"{mode} rename", full=(0, rename), async_mode=mode)
        hooks = [CheckpointHook(2, by_epoch=False)]
        theirs = {"manager": CheckpointManager, "load_only": True, "hooks": hooks, "async_mode": mode}
        seen[mode, "hook"] = run(f"{mode} hook", full=(0, rename), **theirs)
        seen[mode, "again"] = run(f"{mode} data", async_mode=mode)
    return seen
