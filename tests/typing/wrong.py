"""Only type-checked: mypy reports an ignored line that is no error, so each of them fails mypy --strict, and no other."""

from trainbus import CheckpointHook, NoHookOfOurs  # type: ignore[attr-defined]  # noqa: F401
from trainbus.eventloop import Bus, Event, Priority
from trainbus.eventloop.events import AfterTrainIter, AfterValIter

bus = Bus()
CheckpointHook(interval="x")  # type: ignore[arg-type]


class PointsAdded(Event):
    points: int = 0


def val_iter(event: AfterValIter) -> None: ...


async def async_val_iter(event: AfterValIter) -> None: ...


def batched(events: list[AfterValIter]) -> None: ...


def logits(tensor: int) -> None: ...


def pick(event: AfterTrainIter) -> str:
    return str(event)


bus.on(AfterTrainIter, val_iter)  # type: ignore[arg-type]
bus.on("after_train_iter", val_iter)  # type: ignore[arg-type]
bus.on(AfterTrainIter, async_val_iter)  # type: ignore[arg-type]
bus.on("after_train_iter", async_val_iter)  # type: ignore[arg-type]
bus.on("after_run", val_iter, priority=Priority.LOW)  # type: ignore[arg-type]
bus.on(AfterTrainIter)(val_iter)  # type: ignore[arg-type]
bus.on("after_train_iter")(val_iter)  # type: ignore[arg-type]
bus.on("after_train_iter", every=3)(async_val_iter)  # type: ignore[arg-type]
bus.on(AfterTrainIter, every=2)(async_val_iter)  # type: ignore[arg-type]
bus.on(PointsAdded, val_iter)  # type: ignore[arg-type]
bus.on(AfterTrainIter, batched, offload="thread", batch=3)  # type: ignore[call-overload]
bus.on(AfterTrainIter, offload="thread", batch=3)(batched)  # type: ignore[arg-type]
bus.on(AfterTrainIter, logits, offload="thread", capture=pick)  # type: ignore[call-overload]
bus.on(AfterTrainIter, offload="thread", capture=pick)(logits)  # type: ignore[arg-type]
bus.on(AfterTrainIter, val_iter, evry=3)  # type: ignore[call-overload]
bus.on("after_val_iter", val_iter, full="wait")  # type: ignore[call-overload]
bus.on(int, val_iter)  # type: ignore[arg-type, type-var]


@bus.on("after_train_iter")  # type: ignore[arg-type]
def decorated(event: AfterValIter) -> None: ...


bus.publish(AfterTrainIter)  # type: ignore[arg-type]
bus.on("after_val_iter", val_iter)
