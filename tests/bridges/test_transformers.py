"""The bus in a ``transformers.Trainer``: mount points, evaluations, stops, exceptions and hooks, against the real library."""

import asyncio
import math
import shutil
import signal
import threading

import numpy as np
import pytest
import structlog
import torch

transformers = pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback  # noqa: E402

from eventloop import Bus, ConfigurationError, SubscribeError  # noqa: E402
from eventloop.errors import RunCancelled  # noqa: E402
from eventloop.events import AfterTrainIter  # noqa: E402
from hooks import (  # noqa: E402
    EarlyStoppingHook,
    IterTimerHook,
    LoggerHook,
    OptimizerHook,
    ParamSchedulerHook,
    PreemptionHook,
    RuntimeInfoHook,
)
from hooks.writers import JSONLinesWriter  # noqa: E402

from .jobs import heard  # noqa: E402
from .transformers_jobs import Plain, gpt2, make, plain_data  # noqa: E402

STEP = ["before_forward", "after_forward", "before_backward", "after_backward"]
UPDATE = ["before_optimizer_step", "after_optimizer_step"]
ITER = ["before_train_iter", *STEP, *UPDATE, "after_train_iter"]
VAL = ["before_val", "before_val_epoch", *["before_val_iter", "after_val_iter"] * 2, "after_val_epoch", "after_val"]


# ------------------------------------------------------------------------------------------------------ mount points


def test_mount_points_come_in_the_order_of_our_own_loop(tmp_path):
    bus = Bus()
    names = heard(bus)
    make(tmp_path, bus, data=plain_data(4), num_train_epochs=1, eval_strategy="epoch").train()
    train = ["before_train_epoch", *ITER * 2, "after_train_epoch", *VAL]
    assert names == ["before_run", "before_train", *train, "after_train", "after_run"]


def test_micro_batches_are_iterations_and_steps_are_updates(tmp_path):
    bus, seen = Bus(), []
    names = heard(bus)
    bus.on("after_train_iter", lambda e: seen.append((e.progress.iter, e.progress.update, e.run.updated, e.run.last_batch)))
    # 5 batches in windows of 2: the last window of the epoch has one
    trainer = make(tmp_path, bus, data=plain_data(10), num_train_epochs=1, gradient_accumulation_steps=2)
    trainer.train()
    updates = [0, 0, 1, 1, 2]
    assert seen == [(index, updates[index], index in (1, 3, 4), index == 4) for index in range(5)]
    assert names.count("after_optimizer_step") == trainer.state.global_step == 3
    first = names.index("before_train_iter")
    assert names[first : first + 6] == ["before_train_iter", *STEP, "after_train_iter"]


@pytest.mark.parametrize("model", [Plain, gpt2])
def test_the_loss_of_a_micro_batch_is_not_divided_by_the_accumulation(tmp_path, model):
    bus, losses, parts = Bus(), [], []
    bus.on("after_train_iter", lambda event: losses.append(event.outputs["loss"]))
    bus.on("before_backward", lambda event: parts.append(event.loss.detach()))
    trainer = make(tmp_path, bus, model=model, gradient_accumulation_steps=4, logging_strategy="steps", logging_steps=1)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert not losses[0].requires_grad
    assert torch.stack(losses).view(4, 4).mean(1).tolist() == pytest.approx(logged, abs=1e-4)
    assert torch.allclose(torch.stack(losses), 4 * torch.stack(parts))


def test_batches_and_outputs_are_those_of_the_step(tmp_path):
    bus, batches, losses = Bus(), [], []
    bus.on("before_train_iter", lambda event: batches.append((event.batch_idx, event.batch["x"])))
    bus.on("after_forward", lambda event: losses.append(event.outputs["loss"].item()))
    bus.on("after_train_iter", lambda event: losses.append(event.outputs["loss"].item()))
    make(tmp_path, bus, num_train_epochs=1).train()
    assert [index for index, _ in batches] == list(range(8))
    assert all(batch.shape == (2, 3) for _, batch in batches)
    assert losses[0::2] == losses[1::2]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_the_gradient_scaler_skips_is_no_update(tmp_path, optim):
    class Overflowing(Plain):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            self.calls = getattr(self, "calls", 0) + 1
            return out | {"loss": out["loss"] * (math.inf if self.calls == 3 else 1.0)}

    bus, updated = Bus(), []
    bus.on("after_train_iter", lambda event: updated.append(event.run.updated))
    steps = {"optim": optim, "max_grad_norm": 0.0}
    trainer = make(tmp_path, bus, model=Overflowing, data=plain_data(), num_train_epochs=1, **steps)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    bridge_run = []
    bus.on("after_train", lambda event: bridge_run.append(event.run.counters.update))
    trainer.train()
    assert updated == [True, True, False, *[True] * 5]
    assert trainer.state.global_step == 8
    assert bridge_run == [7]


def test_max_steps_in_the_middle_of_an_epoch_end_the_training(tmp_path):
    bus, last = Bus(), []
    names = heard(bus)
    bus.on("after_train_iter", lambda event: last.append(event.run.last_batch))
    bus.on(
        "before_train", lambda event: last.append((event.progress.max_epochs, event.progress.max_iters, event.run.total_iters))
    )
    make(tmp_path, bus, max_steps=11).train()
    assert last == [(None, 11, 11), *[False] * 7, True, False, False, True]
    assert names.count("after_train_epoch") == 2
    assert names[-3:] == ["after_train_epoch", "after_train", "after_run"]


def test_part_of_an_epoch_is_a_number_of_iterations(tmp_path):
    bus, limits = Bus(), []
    bus.on("before_train", lambda event: limits.append((event.progress.max_epochs, event.progress.max_iters)))
    bus.on("after_run", lambda event: limits.append((event.progress.epoch, event.progress.iter)))
    make(tmp_path, bus, num_train_epochs=1.5).train()
    assert limits == [(None, 12), (2, 12)]


def test_an_iterable_dataset_has_epochs_of_unknown_length(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(plain_data(6))

    bus, epochs = Bus(), []
    bus.on("after_train_iter", lambda event: epochs.append((event.progress.epoch, event.batch_idx, event.run.epoch_length)))
    make(tmp_path, bus, data=Stream(), max_steps=5).train()
    assert epochs == [(0, 0, None), (0, 1, None), (0, 2, None), (1, 0, None), (1, 1, None)]


def test_an_epoch_that_a_callback_cuts_short_is_not_told_as_complete(tmp_path):
    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    bus, epochs = Bus(), []
    names = heard(bus)
    bus.on("before_train_epoch", lambda event: epochs.append((event.progress.epoch, event.progress.iter)))
    make(tmp_path, bus, options={"callbacks": [Cut()]}).train()
    assert epochs == [(0, 0), (1, 3)]
    assert names.count("after_train_epoch") == 1


def test_a_subclass_with_its_own_step_and_loss_is_followed(tmp_path):
    class Own(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            loss = outputs["loss"] + 1
            return (loss, outputs) if return_outputs else loss

    bus = Bus()
    names = heard(bus)
    make(tmp_path, bus, kind=Own, data=plain_data(4), num_train_epochs=1, eval_strategy="epoch").train()
    assert names[2:19] == ["before_train_epoch", *ITER * 2]


def test_a_trainer_with_a_loop_of_its_own_is_a_warning(tmp_path):
    class Own(Trainer):
        def train(self, *args, **kwargs):
            self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self.training_step(self.model, {"x": torch.ones(1, 3), "labels": torch.ones(1)})
            self.callback_handler.on_step_end(self.args, self.state, self.control)

    bus = Bus()
    names = heard(bus)
    trainer = make(tmp_path, bus, kind=Own, logging_steps=1)
    trainer.current_gradient_accumulation_steps = 1
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert names == []
    assert [one["event"] for one in logs] == ["Own overrides the training loop, so no mount points are published"]


# -------------------------------------------------------------------------------------------------------- evaluations


def accuracy(prediction):
    return {"accuracy": float(np.mean(np.abs(prediction.predictions)))}


def test_an_evaluation_within_an_epoch_is_a_validation_with_the_metrics_of_the_trainer(tmp_path):
    bus, metrics, outputs, modes = Bus(), [], [], []
    names = heard(bus)
    bus.on("after_val_epoch", lambda event: metrics.append((event.progress.iter, event.metrics)))
    bus.on("after_val_iter", lambda event: outputs.append((event.run.evaluation_length, sorted(event.outputs))))
    bus.on("after_val_iter", lambda event: modes.append(event.run.model.training))
    trainer = make(
        tmp_path, bus, num_train_epochs=1, eval_strategy="steps", eval_steps=3, options={"compute_metrics": accuracy}
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [iteration for iteration, _ in metrics] == [3, 6, 8]
    for (_, ours), theirs in zip(metrics, logged, strict=True):
        assert ours["loss"] == theirs["eval_loss"]
        assert ours["accuracy"] == theirs["eval_accuracy"]
        assert "epoch" not in ours
    assert outputs == [(2, ["labels", "logits", "loss"])] * 6
    assert modes == [False] * 6
    third = [index for index, name in enumerate(names) if name == "after_train_iter"][2]
    assert names[third + 1 : third + 9] == VAL


def test_several_evaluation_sets_are_one_validation(tmp_path):
    bus, metrics = Bus(), []
    names = heard(bus)
    bus.on("after_val_epoch", lambda event: metrics.append(sorted(name for name in event.metrics if name.endswith("loss"))))
    sets = {"one": plain_data(2), "two": plain_data(4)}
    make(tmp_path, bus, num_train_epochs=1, eval_strategy="epoch", options={"eval_dataset": sets}).train()
    assert metrics == [["one_loss", "two_loss"]]
    assert names.count("after_val_iter") == 3


def test_an_evaluation_or_prediction_alone_is_a_run_of_its_own(tmp_path):
    bus, metrics = Bus(), []
    names = heard(bus)
    bus.on("after_val_epoch", lambda event: metrics.append(min(event.metrics)))
    bus.on("after_test_epoch", lambda event: metrics.append(event.metrics["loss"]))
    trainer = make(tmp_path, bus)
    trainer.evaluate()
    assert names == ["before_run", *VAL, "after_run"]
    names.clear()
    result = trainer.predict(plain_data(4))
    assert names == ["before_run", *[name.replace("val", "test") for name in VAL], "after_run"]
    assert metrics == ["loss", result.metrics["test_loss"]]


def test_an_evaluation_by_a_callback_whose_error_it_catches_is_abandoned(tmp_path):
    class Broken(TrainerCallback):
        trainer = None

        def on_prediction_step(self, args, state, control, **kwargs):
            raise ValueError("broken")

        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(ValueError, match="broken"):
                self.trainer.evaluate()

    bus, callback = Bus(), Broken()
    names = heard(bus)
    callback.trainer = make(tmp_path, bus, data=plain_data(4), num_train_epochs=1, options={"callbacks": [callback]})
    callback.trainer.train()
    assert names.count("before_val") == names.count("after_train_iter") == 2
    assert "after_val" not in names
    assert names[-3:] == ["after_train_epoch", "after_train", "after_run"]


def test_an_evaluation_before_the_first_epoch_is_told(tmp_path):
    bus = Bus()
    names = heard(bus)
    make(tmp_path, bus, num_train_epochs=1, eval_on_start=True).train()
    assert names[: len(VAL) + 3] == ["before_run", "before_train", *VAL, "before_train_epoch"]


# --------------------------------------------------------------------------------------------- stop, pause, set_lr


def test_stop_ends_the_training_after_the_window(tmp_path):
    bus, info = Bus(), []
    names = heard(bus)
    bus.on("after_train_iter", lambda event: event.progress.iter == 2 and event.run.stop("enough"))
    bus.on("after_run", lambda event: info.append(event.run.info["stop_reason"]))
    trainer = make(tmp_path, bus, gradient_accumulation_steps=2)
    trainer.train()
    assert names.count("after_train_iter") == 4
    assert trainer.state.global_step == 2
    assert names[-3:] == ["after_train_iter", "after_train", "after_run"]
    assert info == ["enough"]


def test_early_stopping_hooks_and_callbacks_end_the_training(tmp_path):
    ours, theirs = Bus(), Bus()
    ours.add(EarlyStoppingHook("loss", patience=1, min_delta=100.0))
    names, other = heard(ours), heard(theirs)
    evaluate = {"num_train_epochs": 9, "eval_strategy": "steps", "eval_steps": 3}
    make(tmp_path / "ours", ours, **evaluate).train()
    callback = EarlyStoppingCallback(1, 100.0)
    best = {"metric_for_best_model": "loss", "greater_is_better": False, "save_strategy": "steps", "save_steps": 3}
    best["load_best_model_at_end"] = True
    make(tmp_path / "theirs", theirs, **evaluate, **best, options={"callbacks": [callback]}).train()
    for told in (names, other):
        assert told.count("after_train_iter") == 6
        assert told.count("after_val_epoch") == 2
        assert "after_train_epoch" not in told


def test_pause_and_cancel_work_at_the_end_of_an_iteration(tmp_path):
    bus, told = Bus(), []

    @bus.on("after_train_iter")
    def pause(event):
        told.append(event.progress.iter)
        if event.progress.iter == 1:
            event.run.pause()
            threading.Timer(0.1, lambda: (told.append("resumed"), event.run.resume())).start()
        if event.progress.iter == 3:
            event.run.cancel()

    with pytest.raises(RunCancelled):
        make(tmp_path, bus).train()
    assert told == [0, 1, "resumed", 2, 3]


def test_set_lr_scales_the_rest_of_the_schedule(tmp_path):
    def rates(factor, stop=99):
        bus, seen = Bus(), []

        @bus.on("before_optimizer_step")
        def look(event):
            rate = event.optimizer.param_groups[0]["lr"]
            seen.append(rate)

        @bus.on("after_train_iter")
        def change(event):
            if event.progress.iter == 4:
                event.run.set_lr(event.run.optimizers["optimizer"].param_groups[0]["lr"] * factor * 11 / 12)

        make(tmp_path, bus).train()
        return seen

    usual = [1e-2 * (16 - step) / 16 for step in range(16)]
    # in after_train_iter the schedule has already stepped: the rate in force is that of the next step
    factor = 11 / 12 * 0.5
    assert rates(0.5) == pytest.approx([rate if step < 5 else rate * factor for step, rate in enumerate(usual)])


# --------------------------------------------------------------------------------------------------------- exceptions

MOMENTS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exception_in_a_callback_is_told_and_is_what_the_user_sees(tmp_path, moment):
    class Broken(TrainerCallback):
        pass

    def fail(self, *args, **kwargs):
        raise ValueError(moment)

    setattr(Broken, moment, fail)
    bus, told = Bus(), []
    names = heard(bus)
    bus.on("before_train", lambda event: event.run.defer(lambda: told.append("undone")))
    bus.on("on_exception", lambda event: told.append(event.error))
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    every |= {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2}
    trainer = make(tmp_path, bus, num_train_epochs=1, options={"callbacks": [Broken()]}, **every)
    with pytest.raises(ValueError, match=moment):
        trainer.train()
    assert told[0 if moment != "on_train_end" else -1] == f"ValueError: {moment}"
    assert told.count("undone") == 1
    assert "after_run" not in names
    assert bus.state == "idle"


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), StopIteration("mine")])
def test_an_exception_in_the_step_is_told_before_scopes_are_undone(tmp_path, error):
    class Broken(Plain):
        def forward(self, x, labels=None):
            raise error

    bus, told, ran = Bus(), [], []
    bus.on("on_exception", lambda event: told.append(event.exception))
    bus.on("before_train", lambda event: event.run.defer(lambda: told.append("undone")))
    bus.on("after_train_iter", lambda event: ran.append(event))
    trainer = make(tmp_path, bus, model=Broken, data=plain_data())
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error
    assert told == [error, "undone"]
    assert ran == []
    assert bus.state == "idle"


def test_errors_of_handlers_and_offloaded_handlers_end_the_training(tmp_path):
    bus, errors = Bus(), []
    bus.on("on_exception", lambda event: errors.append(event.error))

    @bus.on("after_train_iter", offload="thread")
    def fail(event):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        make(tmp_path, bus, num_train_epochs=50).train()
    with pytest.raises(ZeroDivisionError):
        bus.on("before_val", lambda event: 1 / 0)
        make(tmp_path, bus).evaluate()
    assert bus.state == "idle"


def test_a_smaller_batch_after_an_error_is_a_new_run(tmp_path):
    class Large(Plain):
        def forward(self, x, labels=None):
            if len(x) > 1:
                raise RuntimeError("CUDA out of memory. It only looks like it")
            return super().forward(x, labels)

    bus = Bus()
    names = heard(bus)
    trainer = make(tmp_path, bus, model=Large, data=plain_data(), num_train_epochs=1, auto_find_batch_size=True)
    trainer.train()
    begun = ["before_run", "before_train", "before_train_epoch", "before_train_iter", "before_forward"]
    assert names[: len(begun) * 2 + 1] == [*begun, "on_exception", *begun]
    assert names.count("after_train_iter") == 16


# ---------------------------------------------------------------------------------------------------------- our hooks


def test_hooks_of_our_loop_work(tmp_path):
    bus = Bus()
    bus.add(LoggerHook(interval=2, writers=[JSONLinesWriter()]), IterTimerHook(), RuntimeInfoHook())
    infos = []
    bus.on("after_run", lambda event: infos.append(dict(event.run.info)))
    make(tmp_path, bus, eval_strategy="epoch").train()
    lines = (tmp_path / "scalars.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 + 2
    assert '"train/loss"' in lines[0]
    assert '"train/eta"' in lines[0]
    assert '"train/lr"' in lines[0]
    assert '"val/loss"' in lines[4]
    assert infos[0]["val/loss"] > 0


def test_a_hook_that_steps_what_the_trainer_steps_is_refused(tmp_path):
    bus, trainer = Bus(), make(tmp_path)
    trainer.create_optimizer()
    scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    bus.add(ParamSchedulerHook(scheduler, by="iter"))
    bridge = bus.attach(trainer)
    with pytest.raises(ConfigurationError, match="whose schedule the trainer steps already"):
        trainer.train()
    bridge.detach()
    bus = Bus()
    bus.add(OptimizerHook())
    with pytest.raises(ConfigurationError, match="the trainer steps the optimizers"):
        make(tmp_path, bus).train()


def test_a_signal_saves_and_ends_the_training(tmp_path):
    bus, hook = Bus(), PreemptionHook()
    bus.add(hook)
    bus.on("after_train_iter", lambda event: event.progress.iter == 4 and signal.raise_signal(signal.SIGTERM))
    trainer = make(tmp_path, bus)
    with structlog.testing.capture_logs():
        trainer.train()
    assert hook.received == signal.SIGTERM
    assert trainer.state.global_step == 5
    assert (tmp_path / "iter_5" / "trainbus.pt").is_file()


def test_two_handlers_of_one_signal_are_refused(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    bus = Bus()
    bus.add(PreemptionHook())
    try:
        with pytest.raises(ConfigurationError, match="enable_jit_checkpoint=True handles SIGTERM"):
            make(tmp_path, bus, enable_jit_checkpoint=True).train()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stream_follows_a_training_in_a_thread(tmp_path):
    bus = Bus()

    async def follow():
        losses, trainer = [], make(tmp_path, bus)
        async with bus:
            async with bus.stream(AfterTrainIter) as events:
                training = asyncio.create_task(asyncio.to_thread(trainer.train))
                async for event in events:
                    losses.append(event.outputs["loss"])
                    if event.progress.iter == 15:
                        break
            await training
        return losses

    losses = asyncio.run(follow())
    assert len(losses) == 16
    assert all(isinstance(loss, float) for loss in losses)


# ------------------------------------------------------------------------------------------------------------- detach


def test_detach_leaves_the_trainer_as_it_was(tmp_path):
    bus, trainer = Bus(), make(tmp_path)
    names = heard(bus)
    trainer.compute_loss = own = trainer.compute_loss
    before, handler = dict(vars(trainer)), dict(vars(trainer.callback_handler))
    with bus.attach(trainer), pytest.raises(SubscribeError, match="attached"):
        bus.attach(trainer)
    assert vars(trainer) == before
    assert trainer.compute_loss is own
    assert vars(trainer.callback_handler) == handler
    with bus.attach(trainer):
        trainer.train()
    assert "backward" not in vars(trainer.accelerator)
    assert names.count("before_run") == 1
    trainer.train()
    assert names.count("before_run") == 1


def test_a_second_training_of_the_same_trainer_is_a_new_run(tmp_path):
    bus, begun = Bus(), []
    bus.on("before_train", lambda event: begun.append(event.progress.iter))
    trainer = make(tmp_path, bus, num_train_epochs=1)
    trainer.train()
    trainer.train()
    assert begun == [0, 0]
    shutil.rmtree(tmp_path)
