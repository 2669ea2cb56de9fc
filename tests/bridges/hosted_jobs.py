"""What two processes do in ``test_rounds.py``: a small trainer with a collective in each step, and requests of one rank."""

import os
import signal
import threading
import time

import torch
from structlog.testing import capture_logs
from torch import distributed

from trainbus.bridges import TrainerHost
from trainbus.eventloop import Bus
from trainbus.eventloop.training import HostedRun
from trainbus.eventloop.training.distributed import blocks, rounds
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.hooks import PreemptionHook

from ..failing import fails
from .jobs import AsksOnOne

BATCHES, EPOCHS = 4, 3


def trainer(bus, folder, *, epochs=EPOCHS, slow=0.0, ends_together=True):
    """Train and validate as other trainers do in DDP: a rank that leaves alone would hang. Return where it was."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    host = TrainerHost(".pt")
    run = HostedRun(bus, model=model, optimizer=optimizer, work_dir=folder, host=host)
    drive, done, saved = host.drive, 0, []

    def save(path):
        distributed.barrier()
        saved.append((done, path.name))

    def stops():
        host.saver.write_due(save)
        return drive.should_stop()

    drive.begin_run()
    drive.begin_train(max_epochs=epochs)
    stopped = stops()
    for _ in range(epochs):
        if stopped:
            break
        drive.begin_epoch()
        for _ in range(BATCHES):
            distributed.barrier()
            time.sleep(slow)
            done += 1
            drive.begin_iteration()
            drive.end_iteration({})
            if stopped := stops():
                break
        if stopped:
            drive.abandon_epoch()
            break
        drive.end_epoch()
        drive.begin_evaluation("val")
        drive.end_evaluation({"accuracy": 1.0})
        stopped = stops()
    drive.end_train()
    host.saver.write_due(save)
    drive.end_run()
    if ends_together:
        distributed.barrier()
    return done, saved, run.info.get("stop_reason")


def in_blocks(size, function, *arguments):
    """Call a function where the ranks agree in blocks of ``size``; the tests' store is a file, which has no address."""
    blocks.BLOCK, blocks._tcp, blocks._own_host = size, lambda store: store, lambda store: "127.0.0.1"
    return function(*arguments)


def rank():
    return distributed.get_rank()


def one_rank_stops(folder, which):
    bus, advised = Bus(AsksOnOne(which % distributed.get_world_size())), []
    bus.on("after_run", lambda event: advised.append(event.run.state.own.instead))
    return *trainer(bus, folder), *advised


def all_ranks_stop(folder, mount_point):
    bus = Bus()

    def ask(event):
        event.run.stop("enough")
        if mount_point != "before_train":
            event.run.checkpoints.save()

    bus.on(mount_point, ask)
    return trainer(bus, folder)


def a_thread_pauses(folder):
    bus, paused = Bus(), []
    if rank() == 0:

        def ask(run):
            time.sleep(0.1)
            run.pause()
            while not run.state.agreed.paused:
                time.sleep(0.01)
            time.sleep(0.2)
            paused.append(run.counters.iter)
            time.sleep(0.2)
            paused.append(run.counters.iter)
            run.set_lr(0.5)
            run.unpause()
            while run.state.agreed.paused:
                time.sleep(0.01)
            run.pause()
            time.sleep(0.3)
            run.stop("enough")

        bus.on("before_train", lambda event: threading.Thread(target=ask, args=(event.run,)).start())
    with capture_logs() as logs:
        found = trainer(bus, folder, epochs=1000, slow=0.01)
    told = [(entry["event"], entry["iter"]) for entry in logs if entry["event"].startswith(("the run ", "the learning"))]
    return found, told, paused


def one_rank_gets_a_signal(folder):
    bus = Bus(PreemptionHook())
    bus.on("after_train_iter", lambda event: rank() == 1 and os.kill(os.getpid(), signal.SIGTERM), once=3)
    return trainer(bus, folder)


def ranks_ask_one_after_the_other(folder):
    """The last rank asks after it has answered the first one, but before the save."""
    last, bus = distributed.get_world_size() - 1, Bus()

    def ask(event):
        if event.progress.iter == (4 if rank() == last else 3):
            event.run.checkpoints.save()

    bus.on("after_train_iter", ask)
    return trainer(bus, folder)


def one_rank_evaluates(folder):
    bus = Bus()

    def ask(event):
        if rank() == 0 and event.progress.iter == 3:
            event.run.state.collect_requests()  # a safe point that the other rank does not have
            event.run.stop()
            event.run.state.collect_requests()

    bus.on("before_train_iter", ask)
    return trainer(bus, folder)


def a_rank_has_no_bus(folder, which):
    if rank() == which % distributed.get_world_size():
        for _ in range(BATCHES * EPOCHS + 1):
            distributed.barrier()
        return None
    rounds._SKEW = 0.1  # of this process
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.stop(), once=3)
    with capture_logs() as logs:
        done, *_ = trainer(bus, folder)
    return done, [entry for entry in logs if "without a bus" in entry["event"]]


def one_rank_asks_when_the_others_have_ended(folder):
    """All have joined, but rank 0 has ended before it saw that."""
    rounds.Rounds._all_joined = lambda self: False
    bus = Bus()
    if rank() == distributed.get_world_size() - 1:
        bus.on("after_train_epoch", lambda event: event.run.stop("late"), once=EPOCHS)
    with capture_logs() as logs:
        done, *_ = trainer(bus, folder, ends_together=False)
    return done, [entry["reason"] for entry in logs if "take effect on no rank" in entry["event"]]


def one_agent_is_silent(folder):
    rounds.PATIENCE = 0.5
    put = Mailbox.put
    if rank() == 1:
        Mailbox.put = lambda self, key, *message: key.startswith("answer") or put(self, key, *message)
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.stop(), once=3)
    with capture_logs() as logs:
        done, *_ = trainer(bus, folder)
    return done, [entry for entry in logs if "take effect on no rank" in entry["event"]]


def all_ranks_set_rates(folder):
    bus = Bus()

    def ask(event):
        for rate in (0.2, 0.3, 0.2):
            event.run.set_lr(rate)

    bus.on("after_train_iter", ask, once=3)
    with capture_logs() as logs:
        trainer(bus, folder)
    return [entry["lr"] for entry in logs if entry["event"] == "the learning rate was set"]


def one_rank_fails(folder):
    bus = Bus()
    if rank() == 1:
        bus.on("after_train_iter", fails(KeyboardInterrupt), once=3)
    return trainer(bus, folder)
