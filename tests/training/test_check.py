"""`loop.check()`: what it finds, and that it leaves nothing behind."""

import random
import tempfile
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, Event, Hook
from trainbus.eventloop.training.rng import get_rng_state
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, LoggerHook, ParamSchedulerHook, ProgressBar
from trainbus.hooks.writers import CSVWriter
from trainbus.observe import Dashboard, RunRecordHook


def loaders():
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32) % 3)
    return DataLoader(data, 4, shuffle=True, generator=generator), DataLoader(data, 4)


class Counter(Hook):
    """Counts, and draws random numbers."""

    def __init__(self):
        self.calls = 0
        self.seen = []

    def after_train_iter(self, event):
        self.calls += 1
        self.seen.append(random.random() + np.random.rand() + float(torch.rand(())))

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_check_leaves_nothing_behind(parts, tmp_path, monkeypatch, capfd):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    train, val = loaders()
    model = parts.model(dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    counter, ema = Counter(), EMAHook(momentum=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hooks = (
        *(
            counter,
            ema,
            ParamSchedulerHook(schedule, by="epoch"),
            CheckpointHook(1, out_dir=tmp_path / "elsewhere"),
            ProgressBar(),
        ),
        *(LoggerHook(writers=[CSVWriter()], out_dir=tmp_path / "copies"), RunRecordHook(), EarlyStoppingHook("loss")),
    )
    loop = parts.loop(
        Bus(*hooks), model=model, optimizer=optimizer, train_data=train, val_data=val, work_dir=tmp_path / "run", seed=4
    )
    before = [parts.weights(model), optimizer.state_dict(), get_rng_state(), train.generator.get_state(), schedule.state_dict()]
    before = torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, before)
    result = loop.check()
    assert result.ok, str(result)
    assert result.warnings == []
    assert result.hooks == len(hooks) + 1  # with the update
    assert result.metrics == ["loss"]
    assert result.checkpoint_bytes > 100
    assert result.epoch_seconds > 0
    after = [parts.weights(model), optimizer.state_dict(), get_rng_state(), train.generator.get_state(), schedule.state_dict()]
    parts.assert_same(after, before)
    assert (counter.calls, counter.seen, loop.counters.iter) == (0, [], 0)
    assert [*tmp_path.iterdir()] == [temporary]
    assert not [*temporary.glob("trainbus*")]
    assert capfd.readouterr() == ("", "")


def test_a_training_after_a_check_is_the_same_as_without(parts, tmp_path):
    def trained(checks):
        train, val = loaders()
        model = parts.model(dropout=0.5)
        loop = parts.loop(Bus(Counter(), EMAHook()), model=model, train_data=train, val_data=val)
        torch.manual_seed(1)
        for _ in range(checks):
            loop.check()
        metrics = loop.run()
        return parts.weights(model), metrics

    parts.assert_same(trained(1), trained(0))


class ComesNeverForTests(Event):
    pass


class Waiting(Hook):
    def comes_never_for_tests(self, event):
        raise AssertionError


def test_a_check_names_a_hook_whose_event_never_came(parts):
    result = parts.loop(Bus(Waiting())).check()
    assert result.ok
    assert ["Waiting" in one and "comes_never_for_tests" in one for one in result.warnings] == [True]


@pytest.mark.parametrize("reports", [False, True], ids=["", "another hook may report it"])
def test_a_check_names_a_metric_that_no_validation_reports(parts, reports):
    bus = Bus(EarlyStoppingHook("val_los", rule="less"))
    if reports:
        bus.add(EMAHook())
    result = parts.loop(bus).check()
    assert not result.ok
    assert "val_los" in result.errors[0]
    assert "EarlyStoppingHook" in result.errors[0]


def test_a_metric_that_cannot_be_copied_is_no_error(parts):
    class Score:
        def __init__(self):
            self.lock = threading.Lock()

        def update(self, loss):
            pass

        def compute(self):
            return 0.5

        def reset(self):
            pass

    found = parts.loop(metrics={"score": Score()}).check()
    assert found.ok, str(found)
    assert found.metrics == ["score", "loss"]


def test_a_check_names_the_line_of_an_error_and_the_hook(parts):
    def step(model, batch):
        raise ZeroDivisionError("in step")

    class Failing(Hook):
        def after_val(self, event):
            raise ValueError("in a hook")

    assert "test_check.py" in parts.loop(step=step, sanity=0).check().errors[0]
    assert "val_step() is called without gradients" in parts.loop(val_step=step).check().errors[0]  # the look is part of it
    assert "Failing.after_val" in parts.loop(Bus(Failing())).check().errors[0]


class Forgetful(nn.Linear):
    def load_state_dict(self, *arguments, **options):
        return nn.modules.module._IncompatibleKeys([], [])


def test_a_check_finds_a_resume_that_does_not_restore(parts):
    found = parts.loop(model=Forgetful(4, 3)).check()
    assert not found.ok
    assert any("resume" in one for one in found.errors)


def test_a_check_leaves_out_a_server_and_a_function_and_says_so(parts):
    bus = Bus(Dashboard(0))
    bus.on("after_train_iter", lambda event: pytest.fail("called"))
    found = parts.loop(bus).check()
    assert found.ok
    assert any("Dashboard" in one for one in found.warnings)
    assert any("after_train_iter" in one for one in found.warnings)


def test_a_check_of_iterations_and_limits_estimates_the_limited_number(parts):
    train, val = loaders()
    whole = parts.loop(train_data=train, val_data=val).check()
    limited = parts.loop(train_data=train, val_data=val, limit_train_batches=1, limit_val_batches=1).check()
    by_iter = parts.loop(train_data=train, max_iters=10).check()
    without = parts.loop(train_data=train, val_data=None, max_iters=10).check()
    assert whole.ok
    assert limited.ok
    assert by_iter.ok, str(by_iter)
    assert without.ok, str(without)
    assert by_iter.total_seconds > 0
    assert without.val_seconds is None
    assert by_iter.warnings == without.warnings == []


def test_a_check_needs_data_that_it_can_read_twice(parts):
    assert "train_data" in parts.loop(train_data=iter(parts.batches(3)), max_epochs=1).check().errors[0]


def test_a_check_needs_an_optimizer_and_data(parts):
    with pytest.raises(ConfigurationError, match="optimizer"):
        parts.loop(optimizer=None).check()
    with pytest.raises(ConfigurationError, match="train_data"):
        parts.loop(train_data=None).check()
