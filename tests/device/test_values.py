"""Offloaded handlers get the scalars and captures of the moment of publishing, from any stream, without a wait."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload.scalars import ScalarTaker
from trainbus.eventloop.offload.snapshot import capture

from .conftest import DeviceUnderTest


def publish(bus: Bus, **outputs: Any) -> None:
    bus.publish(AfterTrainIter(progress=Progress(), outputs=outputs))


def test_scalars_have_the_values_at_publishing(accelerator: DeviceUnderTest, stream: str):
    seen, bus, loss = list[Any](), Bus(), torch.zeros((), device=accelerator.device)
    bus.on("after_train_iter", seen.extend, offload="thread", batch=16)
    with bus:
        with accelerator.no_waits():
            for n in range(40):
                loss += 1
                publish(bus, loss=loss, double=loss.double(), n=n)
    assert [event.outputs for event in seen] == [{"loss": n + 1.0, "double": n + 1.0, "n": n} for n in range(40)]


def test_scalars_of_several_dtypes_and_numbers_keep_their_values(accelerator: DeviceUnderTest, stream: str):
    values = {"loss": 0.1, "seen": 2**53 + 1, "right": True, "share": 1 / 3}
    dtypes = {"loss": torch.float32, "seen": torch.int64, "right": torch.bool, "share": torch.float64}
    taker, taken = ScalarTaker(), []
    for number in range(1, 5):
        names = list(values)[:number]
        taken.append(
            taker.take({name: torch.tensor(values[name], dtype=dtypes[name]).to(accelerator.device) for name in names})
        )
    taken.append(
        taker.take({"a": torch.ones(2, device=accelerator.device)[0], "b": torch.zeros((), device=accelerator.device)})
    )
    for number, (_, stacks) in reversed([*enumerate(taken[:4], 1)]):
        found = {name: value for names, stack in stacks for name, value in zip(names, stack.tolist(), strict=True)}
        assert found == {name: torch.tensor(values[name], dtype=dtypes[name]).item() for name in list(values)[:number]}
    assert taken[4][1][0][1].tolist() == [1, 0]


def test_scalars_of_several_streams_arrive_by_one_copy(accelerator: DeviceUnderTest):
    taker, taken = ScalarTaker(), []
    for n in range(6):
        with accelerator.side():
            taken.append(taker.take({"n": torch.full((), float(n), device=accelerator.device)}))
    assert [stacks[0][1].tolist() for _, stacks in reversed(taken)] == [[float(n)] for n in reversed(range(6))]


def _capture_all(event: Any) -> Any:
    return {"logits": event.outputs["logits"], "nested": [(event.outputs["logits"] * 2, 3)]}


async def _async(seen: list[Any], got: Any) -> None:
    seen.append(got)


def _handlers(seen: list[Any]) -> dict[str, Callable[..., Any]]:
    async def asynchronous(got: Any) -> None:
        seen.append(got)

    return {"thread": seen.append, "async": asynchronous}


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_captures_have_the_values_at_publishing(accelerator: DeviceUnderTest, stream: str, kind: str):
    seen, bus, logits = list[Any](), Bus(), torch.zeros(5, 3, device=accelerator.device)
    options = {"offload": "thread"} if kind == "thread" else {}
    bus.on("after_train_iter", _handlers(seen)[kind], capture=_capture_all, **options)
    with bus:
        with accelerator.no_waits():
            for _ in range(20):
                logits += 1
                publish(bus, logits=logits)
    assert len(seen) == 20
    for n, got in enumerate(seen, 1):
        assert got["logits"].is_cpu and (got["logits"] == n).all()
        assert (got["nested"][0][0] == 2 * n).all() and got["nested"][0][1] == 3


def test_a_capture_keeps_its_value_while_its_source_goes_out_of_use(accelerator: DeviceUnderTest, stream: str):
    taken = [capture([torch.full((100,), float(n), device=accelerator.device)]) for n in range(8)]
    del stream
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(one.resolve()[0] for one in taken))
    thread.start()
    thread.join()
    assert all((one == n).all() for n, one in enumerate(found))
