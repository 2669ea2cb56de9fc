import gc
import threading

import pytest
import torch

from eventloop import Bus, Progress
from eventloop.events import AfterTrainIter
from eventloop.offload.ring import ROWS, make_ring
from eventloop.offload.scalars import Scalars

CPU = torch.device("cpu")
P = Progress()


def ring(width=1):
    return make_ring(torch.float32, CPU, width)


def one(value):
    return (torch.tensor(float(value)),)


def test_rows_hold_what_the_tensors_held_when_they_were_written():
    rows, total = ring(), torch.zeros(())
    cells = []
    for _ in range(3 * ROWS):
        total += 1
        cells.append(rows.write((total,)))
    assert [cell.numbers() for cell in cells] == [[float(n)] for n in range(1, 3 * ROWS + 1)]


def test_many_rows_are_read_with_one_copy_in_any_order(monkeypatch):
    cells = [(rows := ring()).write(one(0))] + [rows.write(one(n)) for n in range(1, 40)]
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(len(self)) or tolist(self))
    assert cells[0].numbers() == [0.0]
    assert [cell.numbers()[0] for cell in reversed(cells)] == list(map(float, reversed(range(40))))
    assert reads == [40]


def test_a_row_is_not_written_again_while_an_event_refers_to_its_page():
    rows = ring()
    kept = rows.write(one(-1))
    for n in range(5 * ROWS):
        rows.write(one(n))
    assert kept.numbers() == [-1.0]


def test_memory_is_used_again_once_nothing_refers_to_it():
    rows = ring()
    made = set()
    for n in range(20 * ROWS):
        cell = rows.write(one(n))
        made.add(cell.page._sheet.tensor.data_ptr())
    gc.collect()
    assert len(made) <= 2


def test_publishers_on_several_threads_get_rows_of_their_own():
    rows = ring()
    cells = {}

    def publish(start):
        for n in range(start, start + 500):
            cells[n] = rows.write(one(n))

    threads = [threading.Thread(target=publish, args=(start,)) for start in range(0, 2000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cell.numbers() == [float(n)] for n, cell in cells.items())


def test_what_is_no_scalar_is_refused_and_the_rows_around_it_are_read_all_the_same():
    rows = ring()
    before = rows.write(one(1))
    with pytest.raises(RuntimeError, match="shape"):
        rows.write((torch.ones(1),))
    after = rows.write(one(2))
    assert (before.numbers(), after.numbers()) == ([1.0], [2.0])


def test_rows_of_tensors_made_in_inference_mode_and_with_a_graph():
    rows = ring()
    with torch.inference_mode():
        first = rows.write(one(1))
    weight = torch.tensor(2.0, requires_grad=True)
    second = rows.write((weight * 2,))
    with torch.inference_mode():
        third = rows.write(one(3))
    assert [cell.numbers() for cell in (first, second, third)] == [[1.0], [4.0], [3.0]]
    assert torch.is_grad_enabled()


# ------------------------------------------------------------------------------------------------------- plans


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
    scalars = Scalars()
    for outputs in CHANGES[first:] + CHANGES[:first] + CHANGES[::-1] + CHANGES:
        plan, *taken = scalars.take(outputs)
        expected = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in outputs.items()
            if isinstance(value, int | float | str) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        assert list(plan.numbers(*taken).items()) == list(expected.items())


def test_names_that_never_repeat_do_not_pile_up():
    scalars = Scalars()
    for n in range(1000):
        plan, *taken = scalars.take({f"x{n}": torch.tensor(float(n))})
        assert plan.numbers(*taken) == {f"x{n}": n}
    assert len(scalars._plans) <= 64


# -------------------------------------------------------------------------------------------------- through a lane


@pytest.mark.parametrize("full", ["drop_old", "latest", "drop_new"])
def test_values_are_right_whatever_a_full_lane_drops(full):
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
                    bus.publish(AfterTrainIter(progress=P, outputs={"loss": loss, "double": loss.double(), "n": n}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [event.outputs for event in seen] == [{"loss": n + 1.0, "double": n + 1.0, "n": n} for n in range(500)]
