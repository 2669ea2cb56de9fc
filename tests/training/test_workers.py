"""Workers of DataLoaders, which are forked from a run: they ignore signals that are meant for it, and publish nothing."""

import gc
import os
import signal
import sys
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainbus.eventloop import Bus, Event
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.training import WorkerSignals

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


@contextmanager
def ignored(signals):
    signals.ignore()
    try:
        yield
    finally:
        signals.restore()


@pytest.fixture
def signals():
    return WorkerSignals([signal.SIGTERM])


def loader(kind=DataLoader, **options):
    return kind(Numbers(), batch_size=1, num_workers=1, prefetch_factor=1, **options)


def first(iterator):
    """The process that read the first batch, and whether it has SIGTERM blocked."""
    _, pid, blocked = next(iterator)
    return int(pid), bool(blocked)


@pytest.mark.parametrize("kind", [DataLoader, OwnLoader])
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_worker_survives_the_signal_and_its_children_do_not_block_it(signals, kind, context):
    with ignored(signals):
        batches = iter(loader(kind, multiprocessing_context=context))
        pid, blocked = first(batches)
        os.kill(pid, signal.SIGTERM)
        assert [int(index) for index, _, _ in batches] == [1, 2, 3, 4, 5, 6, 7]
    assert not blocked


def test_persistent_workers_react_to_the_signal_after_restore_and_ignore_it_again(signals):
    data = loader(persistent_workers=True)
    with ignored(signals):
        pid, _ = first(iter(data))
    with ignored(signals):
        assert first(iter(data)) == (pid, False)
        os.kill(pid, signal.SIGTERM)
        assert len(list(data)) == 8
    (worker,) = data._iterator._workers
    os.kill(pid, signal.SIGTERM)
    worker.join()
    assert worker.exitcode == 0


def test_a_forked_process_leaves_the_workers_as_they_are(signals):
    with ignored(signals):
        batches = iter(loader())
        pid, _ = first(batches)
        if not (child := os.fork()):
            status = 1
            try:
                own = iter(loader())
                os.kill(first(own)[0], signal.SIGTERM)  # which obeys
                own._workers[0].join(20)
                status = int(own._workers[0].is_alive())
                signals.restore()  # as a run does that ends in there
                signals.ignore()  # and another one
                signals.restore()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(pid, signal.SIGTERM)
        assert len(list(batches)) == 7


@pytest.mark.parametrize("end", ["signals.restore()", "raise SystemExit"], ids=["restored", "cut short"])
def test_a_process_with_persistent_workers_ends_without_a_word(tmp_path, end):
    """Python terminates them when it exits, and torch reports every worker that died of a signal.

    A run that Ctrl-C strikes again and again has no time to restore them.
    """
    done = run_script(
        f"""
        import signal, sys
        from torch.utils.data import DataLoader
        from trainbus.eventloop.training import WorkerSignals

        data = sys.kept = DataLoader(range(8), num_workers=2, persistent_workers=True)  # as a script's global variable
        signals = WorkerSignals([signal.SIGTERM])
        signals.ignore()
        print(len(list(data)))
        {end}
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "8", "")


def test_earlier_persistent_workers_are_replaced_without_drawing_random_numbers(signals):
    def order(during):
        torch.manual_seed(1)
        data = loader(persistent_workers=True, shuffle=True)
        before, _ = first(iter(data))
        torch.manual_seed(2)
        with during:
            read = [(int(index), int(pid)) for index, pid, _ in data]
        return [index for index, _ in read], torch.rand(()).item(), read[0][1] == before

    *expected, kept = order(nullcontext())
    assert kept
    assert order(ignored(signals)) == (*expected, False)


def test_the_worker_init_function_can_override_the_handler(signals):
    def own(worker):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    data = loader(worker_init_fn=own)
    with ignored(signals):
        assert first(iter(data))[1]
    assert data.worker_init_fn is own


def test_what_ends_with_the_run_is_not_kept_until_the_process_exits():
    signals = WorkerSignals([signal.SIGTERM])
    with ignored(signals):
        assert len(list(loader())) == 8
    gone = weakref.ref(signals)
    del signals
    gc.collect()
    assert gone() is None


def test_loaders_are_restored_afterwards(signals):
    before = [dict(vars(kind)) for kind in (DataLoader, OwnLoader)]
    with ignored(signals):
        assert vars(DataLoader) != before[0]
        assert len(list(DataLoader(range(3)))) == 3
    assert [dict(vars(kind)) for kind in (DataLoader, OwnLoader)] == before


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
    data = DataLoader(Publishing(bus), batch_size=2, num_workers=2, persistent_workers=persistent)
    parts.loop(bus, train_data=data, val_data=None, step=lambda model, batch: model(batch).mean()).run()

    heard = where.read_text().splitlines()
    # Once for each iteration, all in this process, and nothing of what the copies in the workers were told.
    expected = [f"{kind} {os.getpid()}" for kind in ("inline", "task", "thread") for _ in range(8)]
    assert sorted(heard) == expected
    for subscription in (in_thread, as_task):
        assert subscription.stats.published == subscription.stats.delivered == 8
