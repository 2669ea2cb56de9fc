"""Only type-checked: everything here must pass mypy --strict."""

from functools import partial
from pathlib import Path
from typing import Any, assert_type

import torch

from trainbus import Bus as TheBus
from trainbus import EMAHook, __version__
from trainbus.eventloop import Bus, Event, Hook, Stream, Subscription, TrainLoop, mount
from trainbus.eventloop.events import AfterIter, AfterModuleForward, AfterTrainIter, AfterValIter
from trainbus.eventloop.training import Best
from trainbus.observe import Costs

bus = Bus()
assert_type(TheBus(), Bus)
TheBus().add(EMAHook(momentum=0.1))
assert_type(__version__, str)


class PointsAdded(Event):
    points: int = 0


def train_iter(event: AfterTrainIter) -> None: ...
async def async_train_iter(event: AfterTrainIter) -> None: ...
def any_iter(event: AfterIter) -> None: ...
def any_event(event: Event) -> None: ...
def untyped_event(event: Any) -> None: ...
def points_added(event: PointsAdded) -> None: ...
def module_ran(event: AfterModuleForward) -> None: ...
def two_arguments(prefix: str, event: AfterTrainIter) -> None: ...
def logits_of_one(logits: torch.Tensor) -> None: ...
def logits_of_many(logits: list[torch.Tensor]) -> None: ...
def indices_of_many(indices: list[int]) -> None: ...
def train_iters(events: list[AfterTrainIter]) -> None: ...


def pick(event: AfterTrainIter) -> torch.Tensor:
    tensor: torch.Tensor = event.outputs["logits"]
    return tensor


def index_of(event: AfterIter) -> int:
    return event.batch_idx


# As decorators.
bus.on("after_train_iter")(train_iter)
bus.on(AfterTrainIter, priority=30, every=10)(train_iter)
bus.on("after_train_iter", priority="low", once=[1, 2], when=lambda event: True)(any_event)
bus.on(AfterTrainIter)(index_of)
bus.on("after_iter")(any_iter)
bus.on("event")(any_event)
bus.on(AfterTrainIter, AfterValIter)(any_iter)
bus.on("after_train_iter", AfterValIter, "after_test_iter", every=10)(any_iter)
bus.on(AfterTrainIter, every=100)(async_train_iter)
bus.on("after_train_iter", queue=3, full="drop_old", on_error="log")(async_train_iter)
bus.on("after_train_iter", offload="thread", capture=lambda event: event.outputs["logits"])(logits_of_one)
bus.on(AfterTrainIter, offload="thread", capture=pick)(logits_of_one)
bus.on(AfterTrainIter, offload="thread", batch=32)(train_iters)
bus.on("after_train_iter", offload="thread", batch=32)(train_iters)
bus.on("after_train_iter", offload="process", timeout=30, full="latest")(train_iter)
bus.on(AfterTrainIter, offload="thread", capture=pick, max_bytes=1_000_000, timeout=0.5)(logits_of_one)
bus.on(PointsAdded)(points_added)
bus.on("points_added")(points_added)
bus.on(AfterTrainIter, offload="thread", batch=32, capture=lambda event: event.batch_idx)(indices_of_many)
bus.on("after_train_iter", offload="thread", batch=32, capture=pick)(logits_of_many)


@bus.on(AfterTrainIter, priority=30)
def by_class(event: AfterTrainIter) -> int:
    return event.batch_idx


number: int = by_class(AfterTrainIter.__new__(AfterTrainIter))  # a decorated function keeps its type

# With a function.
assert_type(bus.on(AfterTrainIter, AfterValIter, any_iter), Subscription)
assert_type(bus.on("after_train_iter", "after_val_iter", "after_test_iter", any_iter, priority=10), Subscription)
assert_type(bus.on("after_train_iter", train_iter), Subscription)
assert_type(bus.on(AfterTrainIter, train_iter), Subscription)
assert_type(bus.on(AfterTrainIter, async_train_iter), Subscription)
assert_type(bus.on(PointsAdded, points_added), Subscription)
assert_type(bus.on("points_added", any_event), Subscription)
assert_type(bus.on("points_added", untyped_event), Subscription)
assert_type(bus.on(AfterTrainIter, logits_of_one, offload="thread", capture=pick), Subscription)
assert_type(bus.on(AfterTrainIter, train_iters, offload="thread", batch=3), Subscription)
assert_type(bus.on("after_train_iter", partial(two_arguments, "prefix")), Subscription)
assert_type(bus.on(AfterTrainIter, logits_of_many, offload="thread", batch=3, capture=pick), Subscription)
bus.on("after_train_iter", lambda event: event.batch_idx)
bus.on(AfterValIter, lambda event: event.outputs)
bus.on("after_module_forward", module_ran)
assert_type(bus.watch(torch.nn.Linear(1, 1), "*").names, tuple[str, ...])


class Mine(Hook):
    priority = "LOW"

    def after_train_iter(self, event: AfterTrainIter) -> None: ...

    async def after_val_iter(self, event: AfterValIter) -> None: ...

    @mount(every=500, offload="thread", capture=lambda event: event.run.model)
    def before_run(self, model: object) -> None: ...


bus.add(Mine(), priority=3)
with bus.on("after_run", any_event) as subscription:
    subscription.stats.delivered + 1

assert_type(bus.stream("after_train_iter"), Stream[AfterTrainIter])
assert_type(bus.stream(AfterTrainIter, every=10, replay=100), Stream[AfterTrainIter])
assert_type(bus.stream(AfterTrainIter, AfterValIter), Stream[AfterIter])
assert_type(bus.stream("after_train_iter", AfterValIter, replay=100), Stream[Any])
assert_type(bus.stream(AfterTrainIter, AfterValIter, capture=index_of), Stream[int])
assert_type(bus.keep("after_train_iter", AfterValIter, every=10, last=100), Subscription)

# What a loop tells of its training.
loop = TrainLoop(torch.nn.Linear(1, 1), step=lambda model, batch: batch)
assert_type(loop.best, Best | None)
assert_type(loop.history, list[dict[str, Any]])
assert_type(loop.work_dir, Path | None)


# What a hook is told of a run.
def heard(event: AfterTrainIter) -> None:
    assert_type(event.run.bus, Bus)
    assert_type(event.run.bus.costs(), Costs)
    assert_type(event.run.checkpoints.best, Best | None)
    assert_type(event.run.data.total_iters, int | None)
