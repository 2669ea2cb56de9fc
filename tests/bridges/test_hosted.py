"""The run that bridges drive, here by a loop that stands for the trainer: it steps, saves and resumes."""

import signal
from pathlib import Path
from typing import ClassVar

import pytest
import structlog
import torch
from torch import nn

from eventloop import Bus, ConfigurationError, SubscribeError, TrainingError
from eventloop.bridges import Bridge, HostedRun
from eventloop.errors import CheckpointError, CheckpointValueError
from hooks import CheckpointHook, EMAHook, IterTimerHook, LoggerHook, OptimizerHook, RuntimeInfoHook
from hooks.writers import JSONLinesWriter

from .jobs import Counting, assert_same, heard


class Host:
    """Trains like another library: it owns loop, optimizer and files, and a run follows it."""

    def __init__(self, bus, folder=None, accumulate=1):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accumulate = accumulate
        self.run = HostedRun(bus, model=self.model, optimizer=self.optimizer, work_dir=folder, suffix=".pt")
        self.epochs = self.iters = 0
        self.last = ""  # path of the newest file

    def save(self, path):
        with self.run.writing(path):
            entry, weights = self.run.gather_entry(str(path))
            state = {**self.model.state_dict(), **weights.get("model", {})}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": state, "optimizer": self.optimizer.state_dict(), "bus": entry}, path)
        self.last = path

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return saved["bus"]

    def fit(self, epochs, batches=4, resume=None, validate=True):
        drive, run = self.run.driver, self.run
        entry = None if resume is None else self.load(resume)
        drive.begin_run()
        try:
            run.epoch_length = batches
            if entry is not None:
                run.restore_entry(entry, str(resume))
            drive.begin_train(max_epochs=epochs)
            while run.counters.epoch < epochs and not drive.should_stop():
                drive.begin_epoch()
                for index in range(run.counters.batches, batches):
                    self.step(drive, index, batches)
                    run.write_due(self.save)
                    if drive.should_stop():
                        drive.abandon_epoch()
                        break
                else:
                    drive.end_epoch()
                run.write_due(self.save)
                if validate:
                    self.validate(drive)
            drive.end_train()
            run.write_due(self.save)
        except BaseException as error:
            if run.running:
                drive.fail(error)
            raise
        drive.end_run()

    def step(self, drive, index, batches):
        torch.manual_seed(self.run.counters.iter)
        batch = torch.randn(2, 3)
        drive.begin_iteration(batch, last=index + 1 == batches)
        loss = self.model(batch).square().mean()
        (loss / self.accumulate).backward()
        complete = (index + 1) % self.accumulate == 0
        if complete:
            drive.before_step(self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            drive.after_step(self.optimizer)
        self.run.window_open = not complete
        drive.end_iteration({"loss": loss})

    def validate(self, drive):
        self.model.eval()
        drive.begin_validation()
        drive.begin_validation_iteration(torch.ones(1, 3))
        drive.end_validation_iteration({"loss": self.model(torch.ones(1, 3)).sum()})
        drive.end_validation({"accuracy": 0.1 * self.run.counters.epoch})
        self.model.train()
        self.run.write_due(self.save)


def test_a_hosted_run_publishes_in_the_order_of_our_own_loop():
    bus = Bus()
    names = heard(bus)
    Host(bus).fit(1, batches=1)
    step = ["before_train_iter", "before_optimizer_step", "after_optimizer_step", "after_train_iter"]
    val = ["before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"]
    train = ["before_train_epoch", *step, "after_train_epoch", *val]
    assert names == ["before_run", "before_train", *train, "after_train", "after_run"]


def test_counts_are_those_of_the_host_and_a_step_is_an_update():
    bus, seen = Bus(), []
    bus.on("after_train_iter", lambda event: seen.append((event.progress.iter, event.progress.update, event.run.updated)))
    host = Host(bus, accumulate=2)
    host.fit(1, batches=4)
    assert seen == [(0, 0, False), (1, 0, True), (2, 1, False), (3, 1, True)]
    assert host.run.counters.update == 2


def test_the_mode_of_the_model_and_the_metrics_are_the_hosts():
    bus, metrics = Bus(), []
    bus.on("after_val_epoch", lambda event: metrics.append(event.metrics))
    host = Host(bus)
    drive = host.run.driver
    drive.begin_run()
    drive.begin_train()
    drive.begin_validation()
    assert host.model.training
    assert torch.is_grad_enabled()
    drive.begin_validation_iteration()
    drive.end_validation_iteration({"loss": torch.ones(())})
    drive.end_validation({"accuracy": 0.5})
    drive.end_train()
    drive.end_run()
    assert metrics == [{"accuracy": 0.5}]


def test_requested_saves_are_written_by_the_host_and_committed(tmp_path):
    bus, told = Bus(), []
    bus.add(CheckpointHook(interval=1, save_best="accuracy", max_keep_ckpts=1))
    bus.on("checkpoint_committed", lambda event: told.append([Path(name).name for name in event.names]))
    Host(bus, tmp_path).fit(2)
    best = "best_accuracy_epoch_{}.pt"
    assert told == [["epoch_1.pt"], [best.format(1)], ["epoch_2.pt"], [best.format(2)], ["epoch_2.pt"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [best.format(2), "epoch_2.pt"]
    assert torch.load(tmp_path / "epoch_2.pt", weights_only=True)["bus"]["progress"]["epoch"] == 2


def test_two_names_at_one_moment_are_one_file(tmp_path):
    bus = Bus()

    @bus.on("after_train_epoch")
    def ask(event):
        event.run.request_save("one.pt")
        event.run.request_save("two.pt")

    Host(bus, tmp_path).fit(1)
    assert (tmp_path / "one.pt").samefile(tmp_path / "two.pt")


def test_a_save_and_a_stop_wait_for_the_step_of_the_window(tmp_path):
    bus, told = Bus(), []
    bus.on("checkpoint_committed", lambda event: told.append(event.progress.iter))

    @bus.on("after_train_iter", once=1)
    def ask(event):
        event.run.checkpoint_now()
        event.run.stop("enough")

    host = Host(bus, tmp_path, accumulate=2)
    host.fit(3, validate=False)
    assert told == [2]
    assert host.run.counters.iter == 2
    assert (tmp_path / "iter_2.pt").is_file()
    assert host.run.info["stop_reason"] == "enough"


def test_a_failed_save_is_told_and_ends_the_run_unless_it_is_to_be_logged(tmp_path):
    (tmp_path / "file").write_text("")  # where a directory would have to be
    for on_error in ("log", "raise"):
        bus, told = Bus(), []
        bus.on("checkpoint_failed", lambda event, told=told: told.append(event.error))
        bus.on(
            "after_train_epoch",
            lambda event, e=on_error: event.run.request_save("x.pt", directory=tmp_path / "file", on_error=e),
        )
        if on_error == "log":
            Host(bus, tmp_path).fit(1)
        else:
            with pytest.raises(OSError, match="file"):
                Host(bus, tmp_path).fit(1)
        assert len(told) == 1


def test_options_that_need_our_own_format_are_refused_at_once(tmp_path):
    for options in ({"save_optimizer": False}, {"staging": "overlap"}, {"published_keys": "state_dict"}):
        bus = Bus()
        bus.add(CheckpointHook(interval=1, **options))
        with pytest.raises(ConfigurationError, match="another trainer writes"):
            Host(bus, tmp_path).fit(1)


def test_a_value_that_a_checkpoint_cannot_hold_is_an_error_at_the_first_update(tmp_path):
    class Bad(Counting):
        def state_dict(self):
            return {"what": object()}

    bus = Bus()
    bus.add(Bad(), CheckpointHook(interval=100))
    with pytest.raises(CheckpointValueError, match=r"Bad.*what"):
        Host(bus, tmp_path).fit(1)


def test_a_resumed_run_goes_on_with_hooks_counts_and_averages(tmp_path):
    def make(folder):
        bus, hook, ema = Bus(), Counting(), EMAHook(momentum=0.1)
        bus.add(hook, ema, RuntimeInfoHook())
        return Host(bus, folder), hook, ema

    whole, hook, ema = make(tmp_path / "whole")
    whole.fit(4)
    first, *_ = make(tmp_path / "parts")
    first.run.bus.on("after_train_iter", lambda event: event.progress.iter == 5 and event.run.checkpoint_now())
    first.run.bus.on("after_train_iter", lambda event: event.progress.iter == 6 and event.run.stop())
    first.fit(4)
    second, other, average = make(tmp_path / "parts")
    second.fit(4, resume=first.last)
    assert other.seen == hook.seen
    assert len(hook.iters) == 16
    assert second.run.counters.saved() == whole.run.counters.saved()
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert_same(average.average.tensors, ema.average.tensors)


def test_a_file_has_the_averaged_weights_and_each_tensor_once(tmp_path):
    bus, ema = Bus(), EMAHook(momentum=0.1)
    bus.add(ema, CheckpointHook(interval=1))
    host = Host(bus, tmp_path)
    host.fit(1)
    saved = torch.load(tmp_path / "epoch_1.pt", weights_only=True)
    assert_same(saved["model"], ema.average.tensors)
    assert_same(saved["bus"]["ema_state_dict"], host.model.state_dict())
    assert "state_dict" not in saved["bus"]


def test_an_entry_of_another_program_is_refused():
    host = Host(Bus())
    host.run.driver.begin_run()
    with pytest.raises(CheckpointError, match="state of a bus"):
        host.run.restore_entry({"format": 1, "progress": {"epoch": "many"}, "bus": {}})
    with pytest.raises(CheckpointError, match="format 99"):
        host.run.restore_entry({"format": 99, "progress": {}, "bus": {"hooks": {}, "publishes": {}}})
    host.run.driver.end_run()


def test_a_hook_that_steps_the_optimizers_is_refused():
    bus = Bus()
    bus.add(OptimizerHook())
    with pytest.raises(ConfigurationError, match="the trainer steps the optimizers"):
        Host(bus).fit(1)


def test_hooks_of_our_loop_work(tmp_path):
    bus = Bus()
    bus.add(LoggerHook(interval=1, writers=[JSONLinesWriter()]), IterTimerHook(), RuntimeInfoHook())
    host = Host(bus, tmp_path)
    host.fit(2)
    lines = (tmp_path / "scalars.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 + 2
    assert '"train/eta"' in lines[0]
    assert host.run.info["val/accuracy"] == pytest.approx(0.2)


def test_an_exception_is_told_first_and_undone_things_are_undone():
    bus, order = Bus(), []
    bus.on("before_train", lambda event: event.run.defer(lambda: order.append("undone")))
    bus.on("on_exception", lambda event: order.append(event.error))

    @bus.on("after_train_iter")
    def fail(event):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Host(bus).fit(1)
    assert order == ["ValueError: broken", "undone"]
    assert bus.state == "idle"


@pytest.mark.parametrize("call", ["epochs", "train", "validate", "test", "drive", "gather_state", "apply_state"])
def test_what_only_a_loop_of_ones_own_has_is_refused_and_the_host_continues(call):
    bus, counting = Bus(), Counting()
    bus.add(counting)

    @bus.on("after_train_iter")
    def ask(event):
        with pytest.raises(TrainingError, match=rf"run.{call}\(\) is for your own loop.* trainer"):
            getattr(event.run, call)(*() if call == "drive" else ([torch.ones(1, 3)],))

    Host(bus).fit(2)
    assert len(counting.iters) == 8


@pytest.mark.parametrize("what", [object(), nn.Linear(1, 1), signal])
def test_an_unknown_trainer_is_an_error_that_names_the_known_ones(what):
    with pytest.raises(SubscribeError, match=r"lightning.Trainer, transformers.Trainer, ignite.*Run\(bus, accelerator="):
        Bus().attach(what)


def test_subscribing_to_a_mount_point_that_never_comes_is_a_warning():
    class Some(Bridge):
        host = "the Some"
        missing: ClassVar = {"before_forward": "it has none"}

    bus = Bus()
    bus.on("before_forward", print)
    with structlog.testing.capture_logs() as logs:
        bridge = Some(bus, object())
        bus.add_bridge(bridge)
        bus.on("after_forward", print)
        bus.on("before_forward", repr)
        bus.remove_bridge(bridge)
        bus.on("before_forward", str)
    assert [(one["mount_point"], one["reason"], one["handlers"]) for one in logs] == [
        ("before_forward", "it has none", ["print"]),
        ("before_forward", "it has none", ["repr"]),
    ]
