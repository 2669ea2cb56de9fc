"""Only type-checked: everything here must pass mypy --strict."""

from functools import partial
from typing import Any, assert_type

import torch

from eventloop import Bus, Event, Hook, Stream, Subscription, mount
from eventloop.events import AfterIter, AfterModuleForward, AfterTrainIter, AfterValIter
from trainbus import Bus as TheBus
from trainbus import EMAHook, __version__

bus = Bus()
assert_type(TheBus(), Bus)
TheBus().add(EMAHook(momentum=0.1))
assert_type(__version__, str)


class PointsAdded(Event):
    points: int = 0


@bus.on("after_train_iter")
def by_name(event: AfterTrainIter) -> None: ...


@bus.on(AfterTrainIter, priority=30, every=10)
def by_class(event: AfterTrainIter) -> None: ...


@bus.on("after_train_iter", priority="low", once=[1, 2], when=lambda event: True)
def takes_any_event(event: Event) -> None: ...


@bus.on(AfterTrainIter)
def takes_the_group(event: AfterIter) -> int:
    return event.batch_idx


@bus.on("after_iter")
def hears_the_group(event: AfterIter) -> None: ...


@bus.on("event")
def hears_everything(event: Event) -> None: ...


@bus.on(AfterTrainIter, AfterValIter)
def of_two_classes(event: AfterIter) -> None: ...


@bus.on("after_train_iter", AfterValIter, "after_test_iter", every=10)
def of_several_names(event: AfterIter) -> None: ...


of_two: Subscription = bus.on(AfterTrainIter, AfterValIter, of_two_classes)
of_three: Subscription = bus.on("after_train_iter", "after_val_iter", "after_test_iter", of_several_names, priority=10)


@bus.on(AfterTrainIter, every=100)
async def asynchronous(event: AfterTrainIter) -> None: ...


@bus.on("after_train_iter", queue=3, full="drop_old", on_error="log")
async def asynchronous_by_name(event: AfterTrainIter) -> None: ...


@bus.on("after_train_iter", offload="thread", capture=lambda event: event.outputs["logits"])
def captured(logits: torch.Tensor) -> None: ...


def pick(event: AfterTrainIter) -> torch.Tensor:
    tensor: torch.Tensor = event.outputs["logits"]
    return tensor


@bus.on(AfterTrainIter, offload="thread", capture=pick)
def captured_by_class(logits: torch.Tensor) -> None: ...


@bus.on(AfterTrainIter, offload="thread", batch=32)
def batched(events: list[AfterTrainIter]) -> None: ...


@bus.on("after_train_iter", offload="thread", batch=32)
def batched_by_name(events: list[AfterTrainIter]) -> None: ...


@bus.on("after_train_iter", offload="process", timeout=30, full="latest")
def in_a_worker(event: AfterTrainIter) -> None: ...


@bus.on(AfterTrainIter, offload="thread", capture=pick, max_bytes=1_000_000, timeout=0.5)
def within_a_budget(logits: torch.Tensor) -> None: ...


@bus.on(PointsAdded)
def custom_by_class(event: PointsAdded) -> None: ...


@bus.on("points_added")
def custom_by_name(event: PointsAdded) -> None: ...


def two_arguments(prefix: str, event: AfterTrainIter) -> None: ...


def untyped_event(event: Any) -> None: ...


def any_event(event: Event) -> None: ...


assert_type(bus.on("after_train_iter", by_name), Subscription)
assert_type(bus.on(AfterTrainIter, by_class), Subscription)
assert_type(bus.on(AfterTrainIter, asynchronous), Subscription)
assert_type(bus.on(PointsAdded, custom_by_class), Subscription)
assert_type(bus.on("points_added", any_event), Subscription)
assert_type(bus.on("points_added", untyped_event), Subscription)
assert_type(bus.on(AfterTrainIter, captured_by_class, offload="thread", capture=pick), Subscription)
assert_type(bus.on(AfterTrainIter, batched, offload="thread", batch=3), Subscription)
assert_type(bus.on("after_train_iter", partial(two_arguments, "prefix")), Subscription)
bus.on("after_train_iter", lambda event: event.batch_idx)
bus.on(AfterValIter, lambda event: event.outputs)

# A decorated function keeps its type.
by_class(AfterTrainIter.__new__(AfterTrainIter))
number: int = takes_the_group(AfterTrainIter.__new__(AfterTrainIter))


class Mine(Hook):
    priority = "LOW"

    def after_train_iter(self, event: AfterTrainIter) -> None: ...

    async def after_val_iter(self, event: AfterValIter) -> None: ...

    @mount(every=500, offload="thread", capture=lambda event: event.run.model)
    def before_run(self, model: object) -> None: ...


bus.add(Mine(), priority=3)
with bus.on("after_run", any_event) as subscription:
    subscription.stats.delivered + 1


def module_ran(event: AfterModuleForward) -> None: ...


bus.on("after_module_forward", module_ran)
assert_type(bus.watch(torch.nn.Linear(1, 1), "*").names, tuple[str, ...])


@bus.on(AfterTrainIter, offload="thread", batch=32, capture=lambda event: event.batch_idx)
def batched_captures(indices: list[int]) -> None: ...


@bus.on("after_train_iter", offload="thread", batch=32, capture=pick)
def batched_picks(logits: list[torch.Tensor]) -> None: ...


assert_type(bus.on(AfterTrainIter, batched_picks, offload="thread", batch=3, capture=pick), Subscription)

assert_type(bus.stream("after_train_iter"), Stream[AfterTrainIter])
assert_type(bus.stream(AfterTrainIter, every=10, replay=100), Stream[AfterTrainIter])
assert_type(bus.stream(AfterTrainIter, AfterValIter), Stream[AfterIter])
assert_type(bus.stream("after_train_iter", AfterValIter, replay=100), Stream[Any])


def index_of(event: AfterIter) -> int:
    return event.batch_idx


assert_type(bus.stream(AfterTrainIter, AfterValIter, capture=index_of), Stream[int])
assert_type(bus.keep("after_train_iter", AfterValIter, every=10, last=100), Subscription)
