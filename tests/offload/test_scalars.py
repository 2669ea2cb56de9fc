"""Scalars of events: taken as they are when published, read later, without waiting for a device."""

import threading

import pytest
import torch

from eventloop import Bus, Progress
from eventloop.events import AfterTrainIter
from eventloop.offload import scalars
from eventloop.offload.scalars import DeviceStack, ScalarTaker

from ..waiting import on_threads


@pytest.fixture(params=[True, False], ids=["cpu", "elsewhere"], autouse=True)
def on_cpu(request, monkeypatch):
    """Scalars on the CPU, and on a pretended device whose numbers the publisher must not read."""
    if not request.param:
        monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)


def read(taken) -> dict:
    numbers, stacks = taken
    for names, values in stacks:
        numbers.update(zip(names, values.tolist(), strict=True))
    return numbers


def test_scalars_have_the_values_at_publishing():
    taker, total = ScalarTaker(), torch.zeros(())
    taken = []
    for _ in range(200):
        total += 1
        taken.append(taker.take({"total": total}))
    assert [read(one) for one in reversed(taken)] == [{"total": float(n)} for n in range(200, 0, -1)]


def test_publishers_on_several_threads_have_separate_values():
    taker, taken = ScalarTaker(), {}

    def publish(start):
        for n in range(start, start + 500):
            taken[n] = taker.take({"n": torch.tensor(float(n)), "again": n})

    on_threads(publish, *range(0, 2000, 500))
    assert all(read(one) == {"n": n, "again": n} for n, one in taken.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tensors_of_any_grad_mode_and_with_a_graph_are_taken_and_the_mode_is_left_as_it_was(mode):
    taker, taken = ScalarTaker(), []
    for number in (1.0, 3.0):
        with mode():
            enabled = torch.is_grad_enabled()
            taken.append(taker.take({"a": torch.tensor(number)}))
            assert torch.is_grad_enabled() == enabled
        taken.append(taker.take({"a": torch.tensor(number, requires_grad=True) * 2}))
        assert not any(values.requires_grad for _, values in taken[-1][1])
    assert [read(one) for one in taken] == [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}, {"a": 6.0}]
    assert torch.is_grad_enabled()


# ------------------------------------------------------------------------------------------------- copies from a GPU


class Arrived:
    """The event of a copy that was made at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.fixture
def fetches(monkeypatch):
    """Stacks of a pretended GPU, and the sizes of the copies that were made from it."""
    copies = []

    def fetch(tensors, streams):
        copies.append(len(tensors))
        assert streams == {"stream"}
        return torch.stack(tensors), Arrived()

    monkeypatch.setattr(scalars, "_fetch", fetch)
    monkeypatch.setattr(scalars, "stream_finder", lambda device: lambda: "stream")
    return scalars._Fetches(torch.device("cuda", 0)), copies


def test_one_copy_to_the_host_moves_many_events(fetches):
    made, copies = fetches
    stacks = [made.wrap(torch.tensor([float(n), -float(n)])) for n in range(40)]
    assert isinstance(stacks[0], DeviceStack)
    assert stacks[3].query()
    assert [stack.tolist() for stack in reversed(stacks)] == [[float(n), -float(n)] for n in reversed(range(40))]
    assert copies == [40]
    late = made.wrap(torch.zeros(2))
    late.synchronize()
    assert (late.tolist(), copies) == ([0.0, 0.0], [40, 1])


def test_stacks_of_events_that_were_dropped_do_not_pile_up(fetches, monkeypatch):
    made, copies = fetches
    first = made.wrap(torch.tensor([-1.0]))
    for n in range(5000):
        last = made.wrap(torch.tensor([float(n)]))
    assert last.tolist() == [4999.0]
    assert first.tolist() == [-1.0]
    assert copies == [1024, 1]


def test_consumers_on_several_threads_read_the_right_rows(fetches):
    made, _ = fetches
    stacks = [made.wrap(torch.tensor([float(n)])) for n in range(400)]
    found: dict[int, list] = {}

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
def test_outputs_may_change_in_kind_shape_dtype_and_order_from_one_iteration_to_the_next(first):
    taker = ScalarTaker()
    for outputs in CHANGES[first:] + CHANGES[:first] + CHANGES[::-1] + CHANGES:
        taken = taker.take(outputs)
        expected = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in outputs.items()
            if isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        assert list(read(taken).items()) == list(expected.items())


# -------------------------------------------------------------------------------------------------- through a lane


@pytest.mark.parametrize("full", ["drop_old", "latest", "drop_new"])
def test_values_are_correct_when_a_full_lane_drops_events(full):
    seen, bus = [], Bus()
    go = threading.Event()

    @bus.on("after_train_iter", offload="thread", queue=100, full=full, linger=0)
    def look(event):
        go.wait(10)
        seen.append((event.progress.iter, event.outputs["n"]))

    loss = torch.zeros(())
    with bus:
        for n in range(1000):
            loss.fill_(n)
            bus.publish(AfterTrainIter(progress=Progress(iter=n), outputs={"n": loss}))
        go.set()
    assert seen
    assert all(n == value for n, value in seen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_publishing_from_a_gpu_never_waits_for_it():
    seen, bus = [], Bus()
    bus.on("after_train_iter", seen.extend, offload="thread", batch=256)
    loss = torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    with bus:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for n in range(500):
                stream = side if n >= 250 else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss += 1
                    bus.publish(AfterTrainIter(progress=Progress(), outputs={"loss": loss, "double": loss.double(), "n": n}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [event.outputs for event in seen] == [{"loss": n + 1.0, "double": n + 1.0, "n": n} for n in range(500)]
