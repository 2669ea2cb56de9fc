import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trainbus.eventloop import Bus, Hook
from trainbus.eventloop.seams import CLOCK
from trainbus.observe import memory
from trainbus.observe.memory import Memory, kept_by

from ..hooks.conftest import loss_of, make_loop


class Keeps(Hook):
    def __init__(self) -> None:
        self.kept: list = []

    def after_train_iter(self, event): ...


def test_the_objects_of_a_hook_are_its_own_with_tensors_and_arrays():
    hook = Keeps()
    before = kept_by([("Keeps", [vars(hook)])])["Keeps"].bytes
    hook.kept += [torch.zeros(1000), {"array": np.zeros(1000)}, [b"x" * 1000], SimpleNamespace(more="y" * 1000)]
    after = kept_by([("Keeps", [vars(hook)])])["Keeps"].bytes
    assert 14_000 <= after - before <= 18_000


def test_models_optimizers_and_the_bus_are_no_ones_own():
    hook, model = Keeps(), nn.Linear(1000, 1000)
    hook.model, hook.parameters, hook.bus = model, list(model.parameters()), Bus()
    hook.optimizer, hook.kind = torch.optim.SGD(model.parameters(), lr=0.1), Keeps
    assert kept_by([("Keeps", [vars(hook)])])["Keeps"].bytes < 5000


def test_a_shared_object_counts_once():
    shared = np.zeros(100_000)
    kept = kept_by([("one", [[shared]]), ("other", [[shared]])])
    assert kept["one"].bytes > shared.nbytes > kept["other"].bytes


def test_a_cycle_and_a_very_large_hook_end(change):
    change(memory.MOST_OBJECTS, 100)
    hook = Keeps()
    hook.kept += [hook.kept, *([number] for number in range(1000))]
    assert 0 < kept_by([("Keeps", [vars(hook)])])["Keeps"].bytes < 50_000


@pytest.fixture
def machine(change):
    return Machine(change)


class Machine:
    """A process with a memory and a clock of its own."""

    def __init__(self, change) -> None:
        self.bytes, self.now, self.iterations = 100 << 20, 0.0, 0
        change(CLOCK, lambda: self.now)
        self.memory = Memory(lambda: self.bytes)

    def go(self, seconds: int, *, grows: int = 0, hooks=(), subscriptions=(), steps=None, each=lambda: None) -> list:
        for _ in range(seconds):
            self.now += 1
            self.iterations += 10
            self.bytes += grows
            each()
            self.memory.sample(self.iterations, hooks, subscriptions, steps or {})
        return self.memory.growth()


def test_growth_is_known_after_some_samples_and_told_with_its_window(machine):
    assert machine.go(5, grows=1 << 20) == []
    [process] = machine.go(55, grows=1 << 20)
    assert process.name == "process"
    assert process.bytes == int(process.seconds) << 20
    assert process.iterations == 10 * process.seconds
    assert process.seconds >= 20


def test_the_warm_up_and_what_comes_and_goes_are_no_growth(machine):
    machine.go(10, grows=50 << 20)
    waves = iter([64 << 20, -(64 << 20)] * 50)

    def wave() -> None:
        machine.bytes += next(waves)

    [process] = machine.go(90, each=wave)
    assert process.bytes == 0


def test_samples_are_bounded_however_long_a_run_takes(machine):
    [process] = machine.go(10_000, grows=1000)
    assert len(machine.memory._samples) <= memory._MOST_SAMPLES
    assert process.bytes / process.seconds == pytest.approx(1000, rel=0.01)
    assert process.seconds > 3000


def test_the_hook_that_keeps_more_and_more_has_a_name(machine):
    leaks, fine = Keeps(), Keeps()
    fine.name = "Fine"
    fine.kept.append(np.zeros(10_000))
    found = machine.go(60, grows=1 << 20, hooks=[leaks, fine], each=lambda: leaks.kept.append(torch.zeros(1000)))
    assert [one.name for one in found] == ["process", "Keeps"]
    assert found[1].bytes / found[1].iterations == pytest.approx(400, rel=0.5)
    assert found[1].seconds >= 5


def test_a_function_that_keeps_more_and_more_has_a_name_too(bus, machine):
    kept = []

    def leak(event, other=None):
        kept.append(event)

    bus.on("after_train_iter", functools.partial(leak, other=1))
    bus.on("after_val", print)
    found = machine.go(60, grows=1 << 20, subscriptions=bus.subscriptions, each=lambda: kept.append(np.zeros(100)))
    assert [one.name for one in found] == ["process", "leak"]


def test_hooks_are_not_looked_at_while_the_process_does_not_grow(machine):
    class Unseen(Keeps):
        label = property(lambda self: pytest.fail("looked"))

    leaks = Unseen()
    [process] = machine.go(60, hooks=[leaks], each=lambda: leaks.kept.append(torch.zeros(1000)))
    assert process.bytes == 0


LOSSES: list[torch.Tensor] = []


def remember(loss):
    LOSSES.append(loss)


class InGlobals(Hook):
    def after_train_iter(self, event):
        remember(event)


class InItsClass(Hook):
    losses: list[torch.Tensor] = []  # noqa: RUF012

    def after_train_iter(self, event): ...


def in_globals(event):
    return [remember(one) for one in event]


def step(model, batch):
    LOSSES.append(batch)


def lost(kept):
    weight = torch.ones(4, requires_grad=True)
    return lambda: kept.append((weight * 2).sum())


@pytest.mark.parametrize("place", ["attribute", "class", "function of an attribute", "global", "handler", "step"])
def test_losses_with_their_graphs_are_found_wherever_they_are_kept(machine, bus, place):
    hook, steps, kept = Keeps(), {}, LOSSES
    LOSSES.clear()
    match place:
        case "attribute":
            kept = hook.kept
        case "class":
            hook = InItsClass()
            kept = hook.losses
        case "function of an attribute":
            hook.callback = remember
        case "global":
            hook = InGlobals()
        case "handler":
            bus.on("after_train_iter", in_globals)
        case "step":
            steps = {"step": step}
    owner = {"handler": "in_globals", "step": "step"}.get(place, hook.label)
    found = machine.go(60, grows=1 << 20, hooks=[hook], subscriptions=bus.subscriptions, steps=steps, each=lost(kept))
    assert [(one.name, one.graphs) for one in found] == [("process", False), (owner, True)]


def test_a_run_tells_its_bus_the_step_functions_while_it_is_open():
    seen, bus = [], Bus()
    bus.on("after_train_iter", lambda event: seen.append(bus.internal.steps["step"]))

    def train(model, batch):
        return loss_of(model, batch)

    make_loop(bus=bus, step=train, max_epochs=1).run()
    assert (seen, bus.internal.steps) == ([train] * 4, {})
