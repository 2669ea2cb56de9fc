"""``inprocess_job.py FOLDER WHERE PORT``: NVRx calls a training again, in the same process, after rank 1 has failed in it.

Meanwhile rank 0 is in a ``collective``, which ends by a timeout; or in ``python``, where NVRx raises a BaseException.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from trainbus import Bus, CheckpointHook, LoggerHook, TrainLoop
from trainbus.eventloop.events import BeforeTrainIter

SOON = timedelta(seconds=0.2)
FAILS_AT = 5


def make_loop(model, bus, work_dir, step=lambda model, x: mse_loss(model(x), x)):
    return TrainLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        step=step,
        train_data=[torch.full((2, 8), 0.1 * number) for number in range(4)],
        bus=bus,
        max_epochs=3,
        work_dir=work_dir,
        seed=0,
    )


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def main(folder, where, port):
    import nvidia_resiliency_ext.inprocess as inprocess  # the test, which imports this file, may not have it

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    bus = Bus(CheckpointHook(interval=2, by_epoch=False), LoggerHook(interval=1))  # the same one for all calls
    errors = []  # a list, because NVRx may raise its error wherever Python is, in the writing of a file, too

    @inprocess.Wrapper(
        store_kwargs={"port": port},
        monitor_thread_interval=SOON,
        monitor_process_interval=SOON,
        heartbeat_interval=SOON,
        progress_watchdog_interval=SOON,
        last_call_wait=SOON,
    )
    def train(call: inprocess.CallWrapper = None):
        group = f"file://{folder}/group-{call.iteration}"
        distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2, timeout=timedelta(seconds=3))
        model = DistributedDataParallel(make_model())

        def fail(event):
            if event.progress.iter != FAILS_AT or call.iteration:
                return
            if rank:
                raise RuntimeError("boom")
            while where == "python":
                time.sleep(0.01)

        subscription = bus.on(BeforeTrainIter, fail)
        try:
            make_loop(model, bus, folder / "runs").run(resume="auto")
        except BaseException as error:
            errors.append(type(error).__name__)
            raise
        finally:
            subscription.cancel()
        distributed.destroy_process_group()
        return call.iteration, model.module.weight.detach()

    calls, weight = train()
    torch.save((calls, str(bus.state), weight, errors), folder / f"done-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
