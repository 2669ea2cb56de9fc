import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from eventloop import Bus, Hook
from eventloop.observe import memory
from eventloop.observe.memory import Memory, resident, sizes_of


class Keeps(Hook):
    def __init__(self) -> None:
        self.kept: list = []

    def after_train_iter(self, event): ...


def test_the_resident_memory_is_that_of_this_process():
    before = resident()
    array = np.ones(8 << 20)
    assert resident() - before > array.nbytes // 2


def test_without_proc_the_most_memory_so_far_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATM", tmp_path / "none")
    assert resident() > 1 << 20


def test_the_objects_of_a_hook_are_its_own_with_tensors_and_arrays():
    hook = Keeps()
    before = sizes_of([("Keeps", [vars(hook)])])["Keeps"]
    hook.kept += [torch.zeros(1000), {"array": np.zeros(1000)}, [b"x" * 1000], SimpleNamespace(more="y" * 1000)]
    after = sizes_of([("Keeps", [vars(hook)])])["Keeps"]
    assert 14_000 <= after - before <= 18_000


def test_models_optimizers_and_the_bus_are_no_ones_own():
    hook, model = Keeps(), nn.Linear(1000, 1000)
    hook.model, hook.parameters, hook.bus = model, list(model.parameters()), Bus()
    hook.optimizer, hook.kind = torch.optim.SGD(model.parameters(), lr=0.1), Keeps
    assert sizes_of([("Keeps", [vars(hook)])])["Keeps"] < 5000


def test_a_shared_object_counts_once():
    shared = np.zeros(100_000)
    sizes = sizes_of([("one", [[shared]]), ("other", [[shared]])])
    assert sizes["one"] > shared.nbytes > sizes["other"]


def test_a_cycle_and_a_very_large_hook_end(monkeypatch):
    monkeypatch.setattr(memory, "_MOST_OBJECTS", 100)
    hook = Keeps()
    hook.kept += [hook.kept, *([number] for number in range(1000))]
    assert 0 < sizes_of([("Keeps", [vars(hook)])])["Keeps"] < 50_000


class Machine:
    """A process with a memory and a clock of its own."""

    def __init__(self, monkeypatch) -> None:
        self.bytes, self.now, self.iterations = 100 << 20, 0.0, 0
        monkeypatch.setattr(memory, "resident", lambda: self.bytes)
        monkeypatch.setattr(memory.time, "monotonic", lambda: self.now)
        self.memory = Memory()

    def go(self, seconds: int, *, grows: int = 0, hooks=(), subscriptions=(), each=lambda: None) -> list:
        for _ in range(seconds):
            self.now += 1
            self.iterations += 10
            self.bytes += grows
            each()
            self.memory.sample(self.iterations, hooks, subscriptions)
        return self.memory.growth()


def test_growth_is_known_after_some_samples_and_told_with_its_window(monkeypatch):
    machine = Machine(monkeypatch)
    assert machine.go(5, grows=1 << 20) == []
    [process] = machine.go(55, grows=1 << 20)
    assert process.name == "process"
    assert process.bytes == int(process.seconds) << 20
    assert process.iterations == 10 * process.seconds
    assert process.seconds >= 20


def test_the_warm_up_and_what_comes_and_goes_are_no_growth(monkeypatch):
    machine = Machine(monkeypatch)
    machine.go(10, grows=50 << 20)
    waves = iter([64 << 20, -(64 << 20)] * 50)

    def wave() -> None:
        machine.bytes += next(waves)

    [process] = machine.go(90, each=wave)
    assert process.bytes == 0


def test_samples_are_bounded_however_long_a_run_takes(monkeypatch):
    machine = Machine(monkeypatch)
    [process] = machine.go(10_000, grows=1000)
    assert len(machine.memory._samples) <= memory._MOST_SAMPLES
    assert process.bytes / process.seconds == pytest.approx(1000, rel=0.01)
    assert process.seconds > 3000


def test_the_hook_that_keeps_more_and_more_has_a_name(monkeypatch):
    machine, leaks, fine = Machine(monkeypatch), Keeps(), Keeps()
    fine.name = "Fine"
    fine.kept.append(np.zeros(10_000))
    found = machine.go(60, grows=1 << 20, hooks=[leaks, fine], each=lambda: leaks.kept.append(torch.zeros(1000)))
    assert [one.name for one in found] == ["process", "Keeps"]
    assert found[1].bytes / found[1].iterations == pytest.approx(400, rel=0.5)
    assert found[1].seconds >= 5


def test_a_function_that_keeps_more_and_more_has_a_name_too(monkeypatch):
    machine, kept = Machine(monkeypatch), []
    bus = Bus()

    def leak(event, other=None):
        kept.append(event)

    bus.on("after_train_iter", functools.partial(leak, other=1))
    bus.on("after_val", print)
    found = machine.go(60, grows=1 << 20, subscriptions=bus.subscriptions, each=lambda: kept.append(np.zeros(100)))
    assert [one.name for one in found] == ["process", "leak"]


def test_hooks_are_not_looked_at_while_the_process_does_not_grow(monkeypatch):
    machine, leaks = Machine(monkeypatch), Keeps()
    monkeypatch.setattr(memory, "sizes_of", lambda owners: pytest.fail("looked"))
    [process] = machine.go(60, hooks=[leaks], each=lambda: leaks.kept.append(torch.zeros(1000)))
    assert process.bytes == 0
