"""A file never mixes two steps: whatever a training does meanwhile, it holds the state of one moment, bit by bit.

What a file must hold is copied by a handler of ``before_save_checkpoint``, at the moment of the save. Copies beside the
training are held up, so that they begin when the training has gone on as far as it can.
"""

import copy
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from trainbus.eventloop import CheckpointError, Hook, Run, Update, mount
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, EMAHook

STAGINGS = ("block", "overlap")


@pytest.fixture(params=STAGINGS)
def staging(request, monkeypatch):
    foreach_copy = torch._foreach_copy_

    def late(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("trainbus-stage"):
            time.sleep(0.003)  # an iteration of these models takes less
        return foreach_copy(*args, **options)

    monkeypatch.setattr("trainbus.eventloop.checkpoint.layout.foreach_copy_", late)
    return request.param


class Moments:
    """Keeps what every checkpoint has to hold, by its path."""

    def __init__(self, bus, parts):
        self.expected: dict[str, Any] = {}
        self.parts = parts
        bus.on("before_save_checkpoint", lambda e: self.keep(e.path, e.checkpoint), priority=100)

    def keep(self, path, checkpoint):
        if path != ".":  # that is only a check
            self.expected[path] = copy.deepcopy(checkpoint)

    def check(self, files):
        """Compare with the files, of which there must be as many."""
        assert len(self.expected) == files
        for path, expected in self.expected.items():
            found = load(path)
            self.parts.assert_same(found["state_dict"], expected["state_dict"])
            self.parts.assert_same(found, expected)
        distinct = [tree["state_dict"]["0.weight"] for tree in self.expected.values()]
        assert not any(torch.equal(one, other) for one, other in pairwise(distinct))


@pytest.fixture
def moments(bus, parts):
    return Moments(bus, parts)


def train(parts, bus, staging, work_dir, **options):
    bus.add(CheckpointHook(interval=1, by_epoch=False, staging=staging))
    model, defaults = parts.model(dropout=0.2), {"train_data": parts.batches(6), "val_data": None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts.loop(bus, model=model, optimizer=optimizer, work_dir=work_dir, **{**defaults, **options}).run()


def replace(event):
    layer, optimizer = event.run.model[0], event.run.optimizers["optimizer"]
    old = layer.weight
    layer.weight = torch.nn.Parameter(old.detach() + 1)
    optimizer.state.pop(old, None)
    group = optimizer.param_groups[0]["params"]
    group[[parameter is old for parameter in group].index(True)] = layer.weight


def decay(event):
    with torch.no_grad():
        torch._foreach_mul_([*event.run.model.parameters()], 0.9)


TRAININGS = {
    "batch norm and dropout": (lambda bus: None, 16),
    "accumulation": (lambda bus: bus.add(Update(accumulate=3)), 6),  # after 3, 6 and, cut short, 8 batches of each epoch
    "parameters that are replaced between saves": (lambda bus: bus.on("before_train_iter", replace, every=2), 16),
    "weights that change before the step": (lambda bus: bus.on("before_optimizer_step", decay, priority=0), 16),
}


@pytest.mark.parametrize("training", TRAININGS)
def test_with_a_save_after_every_step(parts, bus, moments, staging, tmp_path, training):
    prepare, files = TRAININGS[training]
    prepare(bus)
    train(parts, bus, staging, tmp_path, train_data=parts.batches(8))
    moments.check(files)


def test_with_an_average_that_is_lent_to_the_model_in_validations(parts, bus, moments, staging, tmp_path):
    bus.add(EMAHook(momentum=0.3), CheckpointHook(save_best="loss", rule="less", staging=staging, name="best", save_last=False))

    class Inside(Hook):
        observes = True

        @mount(once=1)
        def after_val_iter(self, event):
            event.run.checkpoints.save(f"inside_{event.progress.epoch}.safetensors", staging=staging)

    bus.add(Inside())
    train(parts, bus, staging, tmp_path, val_data=parts.batches(2, seed=2), train_data=parts.batches(4))
    # A save after the last step of an epoch and in the validation after it have the same state, so the same file.
    moments.check(files=8)


def test_the_weights_of_a_validation_are_the_averaged_ones(parts, bus, moments, staging, tmp_path):
    """In a file that is made while the model has them, and by itself: nothing else is saved after that iteration."""
    bus.add(EMAHook(momentum=0.3))
    bus.on("after_val_iter", lambda e: e.run.checkpoints.save(f"in_{e.progress.epoch}.safetensors", staging=staging), every=2)
    parts.loop(bus, work_dir=tmp_path, train_data=parts.batches(4)).run()
    moments.check(files=2)
    state = load(tmp_path / "in_2.safetensors")
    assert not torch.equal(state["state_dict"]["0.weight"], state["ema_state_dict"]["0.weight"])


def test_weights_swapped_for_a_validation_can_change_before_the_next_step(parts, bus, moments, staging, tmp_path):
    """The file has them as they were: what is lent is nothing that only the optimizer changes."""
    ema = EMAHook(momentum=0.3)
    bus.add(ema)
    bus.on("after_val_epoch", lambda e: e.run.checkpoints.save(f"{e.progress.epoch}.safetensors", staging=staging))

    @bus.on("before_train_epoch", after=1)
    def update_at_the_wrong_time(event):
        ema.average.update_parameters(event.run.model)

    parts.loop(bus, work_dir=tmp_path, train_data=parts.batches(4), max_epochs=3).run()
    moments.check(files=3)


def test_with_steps_that_the_scaler_skips(parts, bus, moments, staging, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    bus.add(Update(scaler=scaler))
    taken: list[int] = []
    bus.on("after_optimizer_step", lambda e: taken.append(e.progress.iter))
    factors = iter([1.0, 1.0, float("inf"), 1.0, 1.0, 1.0])

    def step(model, batch):
        return parts.step(model, batch) * next(factors)

    train(parts, bus, staging, tmp_path, step=step, max_epochs=1)
    assert taken == [0, 1, 3, 4, 5]
    assert len(moments.expected) == 6
    for path, expected in moments.expected.items():
        parts.assert_same(load(path), expected)


def test_in_a_users_own_loop_that_calls_step(parts, bus, moments, staging, tmp_path):
    bus.add(CheckpointHook(interval=1, by_epoch=False, staging=staging))
    model = parts.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path) as run:
        parts.train(run, parts.batches(5), epochs=2)
    moments.check(files=10)


def test_weights_that_are_changed_before_the_step_fail_the_save_loudly(parts, bus, trace, tmp_path, monkeypatch):
    """Only the copy beside the training can notice; copied at once they are saved as they were."""
    foreach_copy, go = torch._foreach_copy_, threading.Event()

    def late(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("trainbus-stage"):
            assert go.wait(30)
        return foreach_copy(*args, **options)

    monkeypatch.setattr("trainbus.eventloop.checkpoint.layout.foreach_copy_", late)

    @bus.on("before_forward", once=2)
    def meddle(event):
        with torch.no_grad():
            event.run.model[0].weight.zero_()
        go.set()

    with pytest.raises(CheckpointError, match=r"state_dict\.0\.weight"):
        train(parts, bus, "overlap", tmp_path)
    assert [event.names for event in trace.of("checkpoint_failed")] == [[str(tmp_path / "iter_1.safetensors")]]
    assert not (tmp_path / "iter_1.safetensors").exists()
