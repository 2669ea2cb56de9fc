"""Only type-checked: each statement marked `error` must fail mypy --strict, and no other."""

from eventloop import Bus, Event, Priority
from eventloop.events import AfterTrainIter, AfterValIter
from trainbus import CheckpointHook, NoHookOfOurs  # noqa: F401  # error

bus = Bus()
CheckpointHook(interval="x")  # error


class PointsAdded(Event):
    points: int = 0


def val_iter(event: AfterValIter) -> None: ...


async def async_val_iter(event: AfterValIter) -> None: ...


def batched(events: list[AfterValIter]) -> None: ...


def logits(tensor: int) -> None: ...


def pick(event: AfterTrainIter) -> str:
    return str(event)


bus.on(AfterTrainIter, val_iter)  # error
bus.on("after_train_iter", val_iter)  # error
bus.on(AfterTrainIter, async_val_iter)  # error
bus.on("after_train_iter", async_val_iter)  # error
bus.on("after_run", val_iter, priority=Priority.LOW)  # error
bus.on(AfterTrainIter)(val_iter)  # error
bus.on("after_train_iter")(val_iter)  # error
bus.on("after_train_iter", every=3)(async_val_iter)  # error
bus.on(PointsAdded, val_iter)  # error
bus.on(AfterTrainIter, batched, offload="thread", batch=3)  # error
bus.on(AfterTrainIter, offload="thread", batch=3)(batched)  # error
bus.on(AfterTrainIter, logits, offload="thread", capture=pick)  # error
bus.on(AfterTrainIter, offload="thread", capture=pick)(logits)  # error
bus.on(AfterTrainIter, val_iter, evry=3)  # error
bus.on("after_val_iter", val_iter, full="wait")  # error
bus.on(int, val_iter)  # error


@bus.on("after_train_iter")  # error
def decorated_by_name(event: AfterValIter) -> None: ...


@bus.on(AfterTrainIter)  # error
def decorated_by_class(event: AfterValIter) -> None: ...


@bus.on(AfterTrainIter, every=2)  # error
async def decorated_async(event: AfterValIter) -> None: ...


bus.publish(AfterTrainIter)  # error
bus.on("after_val_iter", val_iter)
