"""The bus in a ``transformers.Trainer``: mount points, evaluations, stops, exceptions and hooks, against the real library."""

import math
import signal

import numpy as np
import pytest
import structlog
import torch

transformers = pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from trainbus import attach  # noqa: E402
from trainbus.eventloop import Bus, ConfigurationError  # noqa: E402
from trainbus.hooks import ParamSchedulerHook, PreemptionHook  # noqa: E402
from trainbus.testing.host_job import STEP, heard, noted  # noqa: E402

from ..failing import fails  # noqa: E402
from .conformance.transformers import Plain, gpt2, make, plain_data  # noqa: E402

FORWARD = ["before_forward", "after_forward", "before_backward", "after_backward"]
ITER = ["before_train_iter", *FORWARD, *STEP, "after_train_iter"]
VAL = ["before_val", "before_val_epoch", *["before_val_iter", "after_val_iter"] * 2, "after_val_epoch", "after_val"]


@pytest.mark.parametrize("model", [Plain, gpt2])
def test_the_loss_of_a_micro_batch_is_not_divided_by_the_accumulation(tmp_path, model):
    outputs, parts = noted(bus := Bus(), "after_train_iter", "outputs"), []
    bus.on("before_backward", lambda event: parts.append(event.loss.detach()))
    trainer = make(tmp_path, bus, model=model, gradient_accumulation_steps=4, logging_strategy="steps", logging_steps=1)
    trainer.train()
    losses = [one["loss"] for one in outputs]
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert not losses[0].requires_grad
    assert torch.stack(losses).view(4, 4).mean(1).tolist() == pytest.approx(logged, abs=1e-4)
    assert torch.allclose(torch.stack(losses), 4 * torch.stack(parts))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_the_gradient_scaler_skips_is_no_update(tmp_path, optim):
    class Overflowing(Plain):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            self.calls = getattr(self, "calls", 0) + 1
            return out | {"loss": out["loss"] * (math.inf if self.calls == 3 else 1.0)}

    bus, updated = Bus(), []
    bus.on("after_train_iter", lambda event: updated.append(event.run.updated))
    bus.on("after_train", lambda event: updated.append(event.run.counters.update))
    steps = {"optim": optim, "max_grad_norm": 0.0}
    trainer = make(tmp_path, bus, model=Overflowing, data=plain_data(), num_train_epochs=1, **steps)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer.train()
    assert updated == [True, True, False, *[True] * 5, 7]
    assert trainer.state.global_step == 8


@pytest.mark.parametrize(("options", "steps"), [({"max_steps": 11}, 11), ({"num_train_epochs": 1.5}, 12)])
def test_a_training_that_ends_in_the_middle_of_an_epoch_has_a_limit_in_iterations(tmp_path, options, steps):
    names = heard(bus := Bus())
    limits = noted(bus, "before_train", "progress.max_epochs", "progress.max_iters", "run.data.total_iters")
    last = noted(bus, "after_train_iter", "run.data.last_batch")
    ended = noted(bus, "after_run", "progress.epoch", "progress.iter")
    make(tmp_path, bus, **options).train()
    assert (limits, ended) == ([(None, steps, steps)], [(2, steps)])
    assert last == [*[False] * 7, True, *[False] * (steps - 9), True]
    assert names.count("after_train_epoch") == 2
    assert names[-3:] == ["after_train_epoch", "after_train", "after_run"]


def test_an_iterable_dataset_has_epochs_of_unknown_length(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(plain_data(6))

    epochs = noted(bus := Bus(), "after_train_iter", "progress.epoch", "batch_idx", "run.data.epoch_length")
    make(tmp_path, bus, data=Stream(), max_steps=5).train()
    assert epochs == [(0, 0, None), (0, 1, None), (0, 2, None), (1, 0, None), (1, 1, None)]


def test_an_epoch_that_a_callback_cuts_short_is_not_told_as_complete(tmp_path):
    class Cut(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    names = heard(bus := Bus())
    epochs = noted(bus, "before_train_epoch", "progress.epoch", "progress.iter")
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

    names = heard(bus := Bus())
    make(tmp_path, bus, kind=Own, data=plain_data(4), num_train_epochs=1, eval_strategy="epoch").train()
    assert names[2:19] == ["before_train_epoch", *ITER * 2]


def test_a_trainer_with_a_loop_of_its_own_is_a_warning(tmp_path):
    class Own(Trainer):
        def train(self, *args, **kwargs):
            self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self.training_step(self.model, {"x": torch.ones(1, 3), "labels": torch.ones(1)})
            self.callback_handler.on_step_end(self.args, self.state, self.control)

    names = heard(bus := Bus())
    trainer = make(tmp_path, bus, kind=Own, logging_steps=1)
    trainer.current_gradient_accumulation_steps = 1
    with structlog.testing.capture_logs() as logs:
        trainer.train()
    assert names == []
    assert [one["event"] for one in logs] == ["Own overrides the training loop, so no mount points are published"]


def test_an_evaluation_within_an_epoch_is_a_validation_with_the_metrics_of_the_trainer(tmp_path):
    def accuracy(prediction):
        return {"accuracy": float(np.mean(np.abs(prediction.predictions)))}

    names = heard(bus := Bus())
    metrics = noted(bus, "after_val_epoch", "progress.iter", "metrics")
    outputs = noted(bus, "after_val_iter", "run.data.evaluation_length", "outputs", "run.model.training")
    steps = {"eval_strategy": "steps", "eval_steps": 3, "options": {"compute_metrics": accuracy}}
    trainer = make(tmp_path, bus, num_train_epochs=1, **steps)
    trainer.train()
    logged = [line for line in trainer.state.log_history if "eval_loss" in line]
    steps = [iteration for iteration, _ in metrics]
    assert steps[:2] == [3, 6]
    assert steps[2:] in ([], [8])  # a newer trainer evaluates at the end, too
    for (_, ours), theirs in zip(metrics, logged, strict=True):
        assert ours["loss"] == theirs["eval_loss"]
        assert ours["accuracy"] == theirs["eval_accuracy"]
        assert "epoch" not in ours
    assert {(length, *sorted(names), mode) for length, names, mode in outputs} == {(2, "labels", "logits", "loss", False)}
    assert len(outputs) == 2 * len(steps)
    third = [index for index, name in enumerate(names) if name == "after_train_iter"][2]
    assert names[third + 1 : third + 9] == VAL


def test_several_evaluation_sets_are_one_validation(tmp_path):
    names = heard(bus := Bus())
    metrics = noted(bus, "after_val_epoch", "metrics")
    sets = {"one": plain_data(2), "two": plain_data(4)}
    make(tmp_path, bus, num_train_epochs=1, eval_strategy="epoch", options={"eval_dataset": sets}).train()
    assert [sorted(name for name in one if name.endswith("loss")) for one in metrics] == [["one_loss", "two_loss"]]
    assert names.count("after_val_iter") == 3


def test_a_prediction_is_a_test(tmp_path):
    names = heard(bus := Bus())
    metrics = noted(bus, "after_test_epoch", "metrics")
    result = make(tmp_path, bus).predict(plain_data(4))
    assert names == ["before_run", *[name.replace("val", "test") for name in VAL], "after_run"]
    assert [one["loss"] for one in metrics] == [result.metrics["test_loss"]]


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
    names = heard(bus := Bus())
    make(tmp_path, bus, num_train_epochs=1, eval_on_start=True).train()
    assert names[: len(VAL) + 3] == ["before_run", "before_train", *VAL, "before_train_epoch"]


def test_an_early_stopping_callback_ends_the_training(tmp_path):
    names = heard(bus := Bus())
    every = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    best = {"metric_for_best_model": "loss", "greater_is_better": False, "load_best_model_at_end": True}
    stops = {"callbacks": [EarlyStoppingCallback(1, 100.0)]}
    make(tmp_path, bus, num_train_epochs=9, **every, **best, options=stops).train()
    assert names.count("after_train_iter") == 6
    assert names.count("after_val_epoch") == 2
    assert "after_train_epoch" not in names


def test_set_lr_scales_the_rest_of_the_schedule(tmp_path):
    bus, seen = Bus(), []
    bus.on("before_optimizer_step", lambda event: seen.append(event.optimizer.param_groups[0]["lr"]))

    @bus.on("after_train_iter", once=5)  # the schedule has stepped: the rate in force is that of the next step
    def change(event):
        event.run.set_lr(event.run.optimizers["optimizer"].param_groups[0]["lr"] * 0.4)

    make(tmp_path, bus).train()
    usual = [1e-2 * (16 - step) / 16 for step in range(16)]
    assert seen == pytest.approx([rate if step < 5 else rate * 0.4 for step, rate in enumerate(usual)])


MOMENTS = {name for name in vars(TrainerCallback) if name.startswith("on_")} - {"on_init_end", "on_predict", "on_push_begin"}


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_an_exception_in_a_callback_is_told_and_is_what_the_user_sees(tmp_path, moment):
    broken = type("Broken", (TrainerCallback,), {moment: fails(ValueError(moment))})
    bus, told = Bus(), []
    names = heard(bus)
    bus.on("before_train", lambda event: event.run.defer(lambda: told.append("undone")))
    bus.on("on_exception", lambda event: told.append(event.error))
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    every |= {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2}
    trainer = make(tmp_path, bus, num_train_epochs=1, options={"callbacks": [broken()]}, **every)
    with pytest.raises(ValueError, match=moment):
        trainer.train()
    assert told[0 if moment != "on_train_end" else -1] == f"ValueError: {moment}"
    assert told.count("undone") == 1
    assert "after_run" not in names
    assert bus.state == "idle"


def test_a_smaller_batch_after_an_error_is_a_new_run(tmp_path):
    class Large(Plain):
        def forward(self, x, labels=None):
            if len(x) > 1:
                raise RuntimeError("CUDA out of memory. It only looks like it")
            return super().forward(x, labels)

    names = heard(bus := Bus())
    trainer = make(tmp_path, bus, model=Large, data=plain_data(), num_train_epochs=1, auto_find_batch_size=True)
    trainer.train()
    begun = ["before_run", "before_train", "before_train_epoch", "before_train_iter", "before_forward"]
    assert names[: len(begun) * 2 + 1] == [*begun, "on_exception", *begun]
    assert names.count("after_train_iter") == 16


def test_a_hook_that_steps_what_the_trainer_steps_is_refused(tmp_path):
    bus, trainer = Bus(), make(tmp_path)
    trainer.create_optimizer()
    scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    bus.add(ParamSchedulerHook(scheduler, by="iter"))
    attach(bus, trainer)
    with pytest.raises(ConfigurationError, match="schedule"):
        trainer.train()


@pytest.mark.skipif(not hasattr(TrainingArguments, "enable_jit_checkpoint"), reason="Transformers 4 takes no signal")
def test_two_handlers_of_one_signal_are_refused(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    bus = Bus(PreemptionHook())
    try:
        with pytest.raises(ConfigurationError, match="enable_jit_checkpoint=True handles SIGTERM"):
            make(tmp_path, bus, enable_jit_checkpoint=True).train()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_a_timed_training_callbacks_and_a_method_that_was_replaced_before_are_as_they_were(tmp_path):
    trainer = make(tmp_path, num_train_epochs=1)
    trainer.compute_loss = own = trainer.compute_loss
    with attach(Bus(timing=True), trainer):
        trainer.train()
        assert not [name for one in trainer.callback_handler.callbacks for name in vars(one) if name.startswith("on_")]
    assert trainer.compute_loss is own
    assert "backward" not in vars(trainer.accelerator)
