"""A training under NVRx's ``ft_launcher``: its saves and validations take longer than the limit, and its first try hangs.

``heartbeat_job.py FOLDER WHERE``: ``step`` has the training thread of rank 0 hang, ``writer`` the thread that writes a
checkpoint for which training waits. What happens is written to the folder.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from trainbus import Bus, CheckpointHook, HeartbeatHook, TrainLoop
from trainbus.eventloop.checkpoint import commit

PIECE = 4096
"""Bytes, a quarter of the weights."""
SLOW = 0.9
"""Seconds of a batch of a validation, or of a piece of a file; four of them exceed the limit of 3 s."""


def make_loop(model, bus, work_dir, validate):
    data = [torch.full((2, 64), 0.01 * number) for number in range(4)]
    return TrainLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        step=lambda model, x: mse_loss(model(x), x),
        train_data=data,
        val_data=data,
        val_step=validate,
        val_interval=2,
        sanity=0,
        bus=bus,
        max_epochs=2,
        work_dir=work_dir,
        seed=0,
    )


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64, bias=False)


def main(folder, where):
    tries, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    bus = Bus(CheckpointHook(interval=3, by_epoch=False), HeartbeatHook(save_timeout=2.0))
    write, runs = os.write, folder / "runs"

    def hang():
        (folder / "hangs").write_text(str(time.time()))
        time.sleep(600)

    def slow_write(descriptor, data):
        if len(data) == PIECE:
            time.sleep(SLOW)
            if where == "writer" and not tries and (runs / "iter_3.safetensors").exists():
                hang()
        return write(descriptor, data)

    def validate(model, x):
        time.sleep(SLOW)
        return {"loss": mse_loss(model(x), x)}

    @bus.on("before_train", priority=90)
    def note(event):
        (folder / f"began-{rank}-{tries}").write_text(f"{time.time()} {event.progress.iter}")

    @bus.on("before_train_iter", priority=90)
    def check(event):
        if where == "step" and not tries and not rank and event.progress.iter == 6:
            hang()

    commit.CHUNK, os.write = PIECE, slow_write
    make_loop(model, bus, runs, validate).run(resume="auto")
    torch.save(model.module.weight.detach(), folder / f"weight-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
