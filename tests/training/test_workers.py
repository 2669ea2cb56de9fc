"""Workers of DataLoaders, which are forked from a run: they ignore signals that are meant for it, and publish nothing."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import DataLoader, Dataset

from trainbus.eventloop import Bus, Event, Run
from trainbus.eventloop.events import AfterTrainIter
from trainbus.hooks import PreemptionHook

from ..scripts import run_script

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Numbers(Dataset):
    """Eight numbers, and the process that read them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, os.getpid(), signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class OwnLoader(DataLoader):
    """Makes its workers by a method of its own, as torchdata's does."""

    def _get_iterator(self):
        return super()._get_iterator()


class LazyLoader(DataLoader):
    """Starts its workers with the first batch, as Accelerate's does."""

    def __iter__(self):
        yield from super().__iter__()


def loader(kind=DataLoader, **options):
    return kind(Numbers(), batch_size=1, num_workers=1, prefetch_factor=1, **options)


@contextmanager
def preemptible():
    with Run(Bus(PreemptionHook()), model=torch.nn.Linear(1, 1)) as run:
        yield run


def strike(batches):
    """Signal the worker that read the first batch; return its process, and the indices of all batches."""
    indices = []
    for index, pid, blocked in batches:
        if not indices:
            os.kill(int(pid), signal.SIGTERM)
            assert not blocked  # the programs that a dataset starts would inherit it
        indices.append(int(index))
    return int(pid), indices


@pytest.mark.long
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("kind", "context"),
    [(DataLoader, "fork"), (DataLoader, "forkserver"), (DataLoader, "spawn"), (OwnLoader, "fork"), (LazyLoader, "fork")],
)
def test_workers_of_loaders_that_a_run_iterates_survive_the_signal(kind, context, persistent):
    train, val = (loader(kind, multiprocessing_context=context, persistent_workers=persistent) for _ in range(2))
    with preemptible() as run:
        for _ in run.epochs(1):
            assert strike(run.train(train))[1] == [*range(8)]
            assert strike(run.validate(val))[1] == [*range(8)]


def test_a_fork_server_whose_end_would_end_the_workers_is_told_once():
    with capture_logs() as logs, preemptible() as run:
        for _ in run.epochs(2):
            for _ in run.train(loader(multiprocessing_context="forkserver")):
                pass
    assert sum(one.get("id") == "fork-server-ended" for one in logs) == 1


def test_persistent_workers_react_to_the_signal_after_the_run_and_ignore_it_in_the_next_one_of_the_hook():
    data = loader(persistent_workers=True)
    bus = Bus(PreemptionHook())
    pids = set()
    for _ in range(2):
        with Run(bus, model=torch.nn.Linear(1, 1)) as run:
            for _ in run.epochs(1):
                pid, indices = strike(run.train(data))
                assert indices == [*range(8)]
                pids.add(pid)
    assert len(pids) == 1
    (worker,) = data._iterator._workers
    os.kill(worker.pid, signal.SIGTERM)
    worker.join()
    assert worker.exitcode == 0


def test_the_function_of_the_hook_covers_loaders_that_the_run_does_not_iterate():
    hook = PreemptionHook()
    data = loader(worker_init_fn=hook.worker_init_fn, persistent_workers=True)
    next(iter(data))  # before the run
    with Run(Bus(hook), model=torch.nn.Linear(1, 1)):
        assert strike(data)[1] == [*range(8)]


def test_a_forked_process_leaves_the_workers_as_they_are_and_its_own_obey():
    with preemptible() as run:
        for _ in run.epochs(1):
            batches = iter(run.train(loader(multiprocessing_context="fork")))
            _, pid, _ = next(batches)
            if not (child := os.fork()):
                status = 1
                try:
                    own = iter(loader(multiprocessing_context="fork"))
                    _, its, _ = next(own)
                    os.kill(int(its), signal.SIGTERM)
                    own._workers[0].join(20)
                    status = int(own._workers[0].is_alive())
                    hook = PreemptionHook()
                    hook.worker_init_fn.ignore()  # as a run does in there
                    hook.worker_init_fn.restore()
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            os.kill(int(pid), signal.SIGTERM)
            assert len(list(batches)) == 7


@pytest.mark.long
@pytest.mark.parametrize("end", ["", "sys.kept = True; raise SystemExit"], ids=["in order", "cut short"])
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_process_with_persistent_workers_ends_without_a_word(tmp_path, context, end):
    """Python terminates them when it exits, and torch reports every worker that died of a signal.

    A run that Ctrl-C strikes again and again has no time to end.
    """
    done = run_script(
        f"""
        import signal, sys, torch
        from torch.utils.data import DataLoader
        from trainbus.eventloop import Bus, Run
        from trainbus.hooks import PreemptionHook

        data = sys.kept = DataLoader(range(8), num_workers=2, persistent_workers=True, multiprocessing_context="{context}")
        run = Run(Bus(PreemptionHook()), model=torch.nn.Linear(1, 1))
        run.__enter__()
        for _ in run.epochs(1):
            print(len(list(run.train(data))))
            {end}
        run.__exit__(None, None, None)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr
    assert "Traceback" not in done.stderr
    assert "killed by signal" not in done.stderr


def test_the_worker_init_function_of_a_loader_is_called_last_and_stays():
    data = loader(worker_init_fn=block)
    with preemptible() as run:
        for _ in run.epochs(1):
            assert [bool(blocked) for _, _, blocked in run.train(data)] == [True] * 8
    assert data.worker_init_fn is block


def block(worker):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def test_workers_of_a_run_without_the_hook_obey():
    with Run(model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            batches = iter(run.train(data := loader(persistent_workers=True)))
            _, pid, _ = next(batches)
            (worker,) = data._iterator._workers
            with pytest.raises(RuntimeError, match="DataLoader worker"):
                os.kill(int(pid), signal.SIGTERM)
                worker.join()
                list(batches)
            run.stop("its worker was killed")


class Drawn(Event):
    """Published where a sample is drawn."""

    index: int


class Publishing(Numbers):
    """Publishes from within ``__getitem__``, which is called in the workers."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def __getitem__(self, index: int) -> torch.Tensor:
        self.bus.publish(Drawn(index=index))
        return torch.full((4,), float(index))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_forked_from_a_run_with_offloaded_handlers_neither_hang_nor_publish(parts, bus, tmp_path, persistent):
    where = tmp_path / "heard"
    where.touch()

    def note(kind: str, event: object) -> None:
        with where.open("a") as file:
            file.write(f"{kind} {os.getpid()}\n")

    bus.on(Drawn, lambda event: note("drawn", event))
    bus.on(AfterTrainIter, lambda event: note("inline", event))
    in_thread = bus.on(AfterTrainIter, lambda event: note("thread", event), offload="thread")

    async def in_task(event: AfterTrainIter) -> None:
        note("task", event)

    as_task = bus.on(AfterTrainIter, in_task)
    options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    data = DataLoader(Publishing(bus), batch_size=2, **options)
    parts.loop(bus, train_data=data, val_data=None, step=lambda model, batch: model(batch).mean()).run()

    heard = where.read_text().splitlines()
    # Once for each iteration, all in this process, and nothing of what the copies in the workers were told.
    expected = [f"{kind} {os.getpid()}" for kind in ("inline", "task", "thread") for _ in range(8)]
    assert sorted(heard) == expected
    for subscription in (in_thread, as_task):
        assert subscription.stats.published == subscription.stats.delivered == 8
