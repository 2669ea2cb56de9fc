"""Trainings of torchtitan in two processes that share a model by FSDP2."""

import os
import warnings
from contextlib import suppress
from pathlib import Path

from torch import distributed

from trainbus import Bus, CheckpointHook, EMAHook, attach
from trainbus.testing.host_job import Counting, fails, noted


def train(folder):
    """Train without a bus, with one, to a failure and from there, and until one rank stops; return what is to compare."""
    rank = distributed.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    from . import llama

    files, seen = Path(folder), {}

    def run(name, *, fails_at=None, stops_at=None, bus=True, **options):
        trainer = llama.make(files / "files", files / name, steps=8, **options)
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
