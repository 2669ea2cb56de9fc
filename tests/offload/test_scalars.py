"""Scalars of events: taken as they are when published, read later, without waiting for a device."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload import scalars
from trainbus.eventloop.offload.scalars import DeviceStack, ScalarTaker
from trainbus.testing import simulated_device

from ..device.conftest import PLAIN, TAKEN
from ..waiting import on_threads


@pytest.fixture(params=["cpu", *(pytest.param(order, marks=TAKEN) for order in ("needed", PLAIN))])
def place(request) -> Iterator[torch.device]:
    """The CPU, and simulated devices with streams and without."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with simulated_device(request.param) as accelerator:
        yield accelerator.device


def read(taken) -> dict:
    numbers, stacks = taken
    for names, values in stacks:
        numbers.update(zip(names, values.tolist(), strict=True))
    return numbers


def test_scalars_have_the_values_at_publishing(place):
    taker, total = ScalarTaker(), torch.zeros((), device=place)
    taken = []
    for _ in range(200):
        total += 1
        taken.append(taker.take({"total": total}))
    assert [read(one) for one in reversed(taken)] == [{"total": float(n)} for n in range(200, 0, -1)]


def test_publishers_on_several_threads_have_separate_values(place):
    taker, taken = ScalarTaker(), {}

    def publish(start):
        for n in range(start, start + 100):
            taken[n] = taker.take({"n": torch.tensor(float(n), device=place), "again": n})

    on_threads(publish, *range(0, 400, 100))
    assert all(read(one) == {"n": n, "again": n} for n, one in taken.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tensors_of_any_grad_mode_and_with_a_graph_are_taken_and_the_mode_is_left_as_it_was(place, mode):
    taker, taken = ScalarTaker(), []
    for number in (1.0, 3.0):
        with mode():
            enabled = torch.is_grad_enabled()
            taken.append(taker.take({"a": torch.tensor(number, device=place)}))
            assert torch.is_grad_enabled() == enabled
        taken.append(taker.take({"a": torch.tensor(number, device=place, requires_grad=True) * 2}))
        stacked = [values.tensor if isinstance(values, DeviceStack) else values for _, values in taken[-1][1]]
        assert not any(tensor.requires_grad for tensor in stacked)
    assert [read(one) for one in taken] == [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}, {"a": 6.0}]
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------------------------------- copies from a device


@pytest.fixture
def fetches(monkeypatch):
    """A function that makes stacks of numbers on a device with streams, and how many are fetched at a time."""
    copies: list[int] = []
    fetch = scalars._fetch

    def counted(stacks):
        copies.append(len(stacks))
        fetch(stacks)

    monkeypatch.setattr(scalars, "_fetch", counted)
    with simulated_device("needed") as accelerator:
        made, device = scalars._Fetches(accelerator.device), accelerator.device
        yield lambda *numbers: made.wrap(torch.tensor(numbers, device=device)), copies


@TAKEN
def test_scalars_of_many_events_are_fetched_at_once(fetches):
    stack, copies = fetches
    stacks = [stack(float(n), -float(n)) for n in range(40)]
    assert isinstance(stacks[0], DeviceStack)
    assert not stacks[3].query()  # the copy begins
    assert stacks[3].query()
    assert [one.tolist() for one in reversed(stacks)] == [[float(n), -float(n)] for n in reversed(range(40))]
    assert copies == [40]
    late = stack(0.0, 1.0)
    late.synchronize()
    assert (late.tolist(), copies) == ([0.0, 1.0], [40, 1])


@TAKEN
def test_stacks_of_events_that_were_dropped_do_not_pile_up(fetches):
    stack, copies = fetches
    first = stack(-1.0)
    for n in range(1500):
        last = stack(float(n))
    assert last.tolist() == [1499.0]
    assert first.tolist() == [-1.0]
    assert copies == [1024, 1]


@TAKEN
def test_consumers_on_several_threads_read_the_right_rows(fetches):
    stack, _ = fetches
    stacks = [stack(float(n)) for n in range(400)]
    found: dict[int, list[Any]] = {}

    def consume(start):
        for n in range(start, 400, 4):
            found[n] = stacks[n].tolist()

    on_threads(consume, *range(4))
    assert found == {n: [float(n)] for n in range(400)}


# ----------------------------------------------------------------------------------------------------- changes


CHANGES = [
    {"a": torch.tensor(1.5), "b": 2.0},
    {"a": torch.tensor(1.5, dtype=torch.float64), "b": 2.0},
    {"a": torch.tensor(1 / 3, dtype=torch.float64), "b": 2.0},
    {"a": torch.tensor(0.1, dtype=torch.bfloat16), "b": torch.tensor(2**53 + 1)},
    {"a": torch.tensor(7), "b": torch.tensor(2**62 + 1)},
    {"a": torch.tensor(True), "b": "warmup"},
    {"a": torch.ones(1), "b": 2},
    {"a": torch.ones(1, 1) / 4, "b": 2},
    {"a": torch.ones(()), "b": torch.ones(2, 3)},
    {"a": 0.5, "b": torch.tensor(0.25)},
    {"b": torch.tensor(0.25), "a": 0.5},
    {"a": object(), "b": None},
    {},
]


@pytest.mark.parametrize("first", range(len(CHANGES)))
def test_outputs_may_change_in_kind_shape_dtype_and_order_from_one_iteration_to_the_next(place, first):
    taker = ScalarTaker()
    for changed in CHANGES[first:] + CHANGES[:first] + CHANGES[::-1] + CHANGES:
        outputs = {name: value.to(place) if isinstance(value, torch.Tensor) else value for name, value in changed.items()}
        taken = taker.take(outputs)
        expected = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in outputs.items()
            if isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        assert list(read(taken).items()) == list(expected.items())


# -------------------------------------------------------------------------------------------------- through a lane


@pytest.mark.parametrize("full", ["drop_old", "latest", "drop_new"])
def test_values_are_correct_when_a_full_lane_drops_events(place, full):
    seen, bus = [], Bus()
    go = threading.Event()

    @bus.on("after_train_iter", offload="thread", queue=100, full=full, linger=0)
    def look(event):
        go.wait(10)
        seen.append((event.progress.iter, event.outputs["n"]))

    loss = torch.zeros((), device=place)
    with bus:
        for n in range(1000 if place.type == "cpu" else 300):
            loss.fill_(n)
            bus.publish(AfterTrainIter(progress=Progress(iter=n), outputs={"n": loss}))
        go.set()
    assert seen
    assert all(n == value for n, value in seen)
