"""The iterators of a run end when all is done, and never because code of the user's raised StopIteration (as in PEP 479)."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainbus.eventloop import Progress, Run
from trainbus.eventloop.errors import StopIterationError
from trainbus.eventloop.events import AfterRun

from ..failing import fails


def runs_dry(*anything: object, **named: object) -> None:
    next(iter(()))


@pytest.mark.parametrize(
    "mount_point", ["before_train", "before_train_iter", "after_train_iter", "before_val_iter", "after_val"]
)
def test_a_stop_iteration_in_a_users_own_loop_is_an_error(parts, bus, mount_point):
    bus.on(mount_point, runs_dry)
    with pytest.raises(StopIterationError, match=f"runs_dry of {mount_point}"), Run(bus, model=parts.model()) as run:
        for _ in run.epochs(2):
            list(run.train(parts.batches(3)))
            list(run.validate(parts.batches(2)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("offload", "error"),
    [*itertools.product(["thread", "async"], [StopIteration, StopAsyncIteration]), ("process", StopIteration)],
)
def test_of_an_offloaded_handler_it_is_an_error_on_the_training_thread(parts, bus, offload, error):
    async def task(event):
        raise error

    if offload == "async":
        bus.on("after_train_iter", task, once=2)
    else:
        bus.on("after_train_iter", fails(error) if offload == "thread" else runs_dry, once=2, offload=offload)
    bus.on("after_train_iter", lambda event: bus.drain(), priority=100)
    # In a coroutine, Python itself makes a RuntimeError of StopIteration.
    raised = RuntimeError if offload == "async" and error is StopIteration else StopIterationError
    with pytest.raises(raised, match=rf"raised {error.__name__}") as caught, capture_logs():
        parts.loop(bus).run()
    assert f"in the offloaded ({offload}) handler" in caught.value.__notes__[0]


@pytest.mark.anyio
async def test_a_host_gets_an_error_of_an_async_handler_that_raises_stop_async_iteration(bus):
    async def ship(event):
        raise StopAsyncIteration

    bus.on("after_run", ship)
    with pytest.raises(StopIterationError, match="ship of after_run"), capture_logs():
        async with bus:
            bus.publish(AfterRun(progress=Progress()))


def metric(**methods):
    """Return options of a loop with a metric of these methods."""
    others = {"update": lambda loss: None, "compute": lambda: None, "reset": lambda: None}
    return {"metrics": {"last": SimpleNamespace(**{**others, **methods})}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: runs_dry}, rf"^{name}\(\) raised StopIteration") for name in ("step", "val_step", "test_step")),
        *((metric(**{name: runs_dry}), "runs_dry.*'last'") for name in ("compute", "reset")),
        (metric(update=lambda loss: runs_dry()), "<lambda>.*'last'"),
    ],
)
def test_a_step_and_a_metric_are_named(parts, options, named):
    loop = parts.loop(test_data=parts.batches(1), **options)
    with pytest.raises(StopIterationError, match=named):
        loop.run()
        loop.test()


@pytest.mark.parametrize("mount_point", ["before_train", "before_train_epoch", "before_train_iter", "before_val"])
def test_a_deferred_function_is_named(parts, bus, mount_point):
    bus.on(mount_point, lambda event: event.run.defer(runs_dry))
    with pytest.raises(StopIterationError, match="runs_dry"), capture_logs():
        parts.loop(bus).run()


def test_a_schedule_is_named_with_its_handler(parts, bus):
    loop = parts.loop(bus)
    schedule = torch.optim.lr_scheduler.LambdaLR(loop._optimizer, lambda step: 1.0)
    schedule.lr_lambdas = [lambda step: next(iter(()))]
    bus.on("after_train_epoch", lambda event: schedule.step())
    with pytest.raises(StopIterationError, match="after_train_epoch"):
        loop.run()


class Dry(Dataset):
    """A map-style dataset whose third sample reads from an iterator that is used up."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(4) if index < 2 else next(iter(()))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(4)] * 6)


class Unready:
    """A loader that cannot even begin."""

    __iter__ = runs_dry


LOADERS = {
    "dataset": lambda: DataLoader(Dry()),
    "dataset in batches": lambda: DataLoader(Dry(), batch_size=2),
    "dataset in a worker": lambda: DataLoader(Dry(), batch_size=2, num_workers=1),
    "collate_fn": lambda: DataLoader(list(range(6)), collate_fn=runs_dry),
    "collate_fn of an iterable dataset": lambda: DataLoader(Stream(), batch_size=2, collate_fn=runs_dry),
    "unready": Unready,
    "a batch that cannot be moved": lambda: [SimpleNamespace(to=runs_dry)],
}


@pytest.mark.parametrize("which", LOADERS)
def test_code_that_an_iterator_of_batches_calls_does_not_end_it(parts, which):
    for method, data in (("train", "train_data"), ("validate", "val_data"), ("test", "test_data")):
        with pytest.raises(StopIterationError, match=rf"run\.{method}|{data}"), Run(model=parts.model(), device="cpu") as run:
            list(getattr(run, method)(LOADERS[which]()))


@pytest.mark.parametrize("batch_size", [None, 2, 4])
def test_an_iterable_dataset_still_ends_by_itself(parts, batch_size):
    with Run(model=parts.model()) as run:
        assert len(list(run.train(DataLoader(Stream(), batch_size=batch_size)))) == {None: 6, 2: 3, 4: 2}[batch_size]


def test_a_save_does_not_end_the_epochs(parts, bus, tmp_path):
    state = SimpleNamespace(state_dict=runs_dry, load_state_dict=print)
    bus.on("after_train_iter", lambda event: event.run.checkpoints.save("x.safetensors"), once=1)
    with pytest.raises(StopIterationError) as caught:
        parts.loop(bus, stateful={"mine": state}, work_dir=tmp_path).run()
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_loader_that_ends_before_its_length_is_warned_of_once(parts, logs):
    class Short(list):
        def __len__(self):
            return 5

    parts.loop(train_data=Short(parts.batches(3)), val_data=None, max_epochs=3).run()
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line.get("id") == "loader-ended-early"
    assert (line["data"], line["batches"], line["length"]) == ("train_data", 3, 5)


@pytest.mark.parametrize("which", ["train", "validate", "test"])
def test_the_iterator_of_a_loader_has_its_length_dataset_and_sampler(parts, which):
    dataset = [torch.rand(4) for _ in range(6)]
    loader = DataLoader(dataset, batch_size=2)
    with Run(model=parts.model()) as run:
        batches = getattr(run, which)(loader)
        assert len(batches) == len(list(batches)) == 3
        assert batches.dataset is dataset
        assert batches.sampler is loader.sampler


@pytest.mark.parametrize("options", [{"endless": True}, {}])
def test_an_iterator_without_a_length_is_a_loop_all_the_same(parts, options):
    data = range(3) if options else (index for index in range(3))
    with Run(model=parts.model()) as run:
        for _ in run.epochs(max_iters=3):
            batches = run.train(data, **options)
            with pytest.raises(TypeError):
                len(batches)
            assert not hasattr(batches, "dataset")
            assert list(batches) == [0, 1, 2]


def test_the_indices_of_iterations_have_their_number(parts):
    with Run(model=parts.model()) as run:
        indices = run.iterations(4)
        assert len(indices) == len(list(indices)) == 4
