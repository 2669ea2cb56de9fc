"""``attach`` for a ``lightning.Trainer``, with Lightning itself."""

from contextlib import nullcontext

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import callbacks  # noqa: E402

from trainbus import attach  # noqa: E402
from trainbus.eventloop import Bus, ConfigurationError, TrainingError  # noqa: E402
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, LRSweepHook, ParamSchedulerHook, RuntimeInfoHook  # noqa: E402
from trainbus.observe import RunRecordHook  # noqa: E402
from trainbus.observe.report.reported_run import ReportedRun  # noqa: E402
from trainbus.testing.host_job import (  # noqa: E402
    STEP,
    VAL,
    assert_same,
    checkpoints,
    heard,
    loader,
    noted,
)

from ..failing import fails  # noqa: E402
from .conformance import WARNINGS  # noqa: E402
from .conformance.lightning import QUIET, Module, module_of  # noqa: E402

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory for the files that Lightning writes there."""
    monkeypatch.chdir(tmp_path)


class Manual(Module):
    """Two optimizers that the module steps itself."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if optimizer.param_groups[0]["lr"] > 0.01 or batch_idx % 2 == 0:
                optimizer.step()
        return {"loss": loss, "twice": 2 * loss}

    def configure_optimizers(self):
        parts = ((self.net.layers[0], 0.1), (self.net.layers[3], 0.01))
        return [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in parts]


def trainer_of(folder=None, **options):
    where = {"default_root_dir": folder} if folder else {}
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **QUIET, **where, **options})


def test_the_sanity_check_warns_of_a_metric_that_the_module_does_not_log():
    bus = Bus(EarlyStoppingHook("val_los", rule="less", strict=True))
    with attach(bus, trainer := trainer_of(max_epochs=1, num_sanity_val_steps=1)):
        with structlog.testing.capture_logs() as logs, pytest.raises(TrainingError, match="'val_los'"):
            trainer.fit(Module(), loader(1), loader(1))
    (first, *_) = [entry["event"] for entry in logs if entry["log_level"] == "warning" and "val_los" in entry["event"]]
    assert "the sanity check" in first
    assert "did you mean 'val_loss'" in first


def test_a_validation_in_the_middle_of_an_epoch_comes_there_and_the_sanity_check_is_not_told():
    names = heard(bus := Bus())
    attach(bus, trainer := trainer_of(max_epochs=1, val_check_interval=1, num_sanity_val_steps=2))
    trainer.fit(Module(), loader(2), loader(1))
    forward = ["before_forward", "after_forward", "before_backward", "after_backward"]
    iteration = ["before_train_iter", *forward, *STEP, "after_train_iter"]
    epoch = ["before_train_epoch", *iteration, *VAL, *iteration, "after_train_epoch", *VAL]
    assert names == ["before_run", "before_train", *epoch, "after_train", "after_run"]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_counts_no_step_that_the_scaler_skips(precision):
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None

    class Overflowing(Module):
        def on_before_optimizer_step(self, optimizer):
            pass

        def on_after_backward(self):
            if self.trainer.global_step == 1:
                self.net.layers[0].weight.grad[0, 0] = float("inf")

    updates = noted(bus := Bus(), "after_train_iter", "run.updated")
    names = heard(bus)
    attach(bus, trainer := trainer_of(max_epochs=1, plugins=[MixedPrecision(precision, "cpu", scaler)]))
    trainer.fit(Overflowing(), loader(3))
    assert updates == [True, scaler is None, True]
    assert names.count("before_optimizer_step") == names.count("after_optimizer_step") == sum(updates)


def test_manual_optimization_with_several_optimizers():
    bus, steps, seen = Bus(RuntimeInfoHook()), [], []
    for name in STEP:
        bus.on(name, lambda event: steps.append(event.name))
    bus.on("after_train_iter", lambda e: seen.append((set(e.outputs), e.run.steps.of(e.run.optimizers["optimizer1"]))))
    bridge = attach(bus, trainer := trainer_of(max_epochs=1))
    trainer.fit(Manual(), loader(2))
    assert steps == ["optimizer0"] * 2 + ["optimizer1"] * 2 + ["optimizer0"] * 2
    names = {"loss", "twice", "optimizer0/lr", "optimizer1/lr"}
    assert seen == [(names, True), (names, False)]
    assert bridge.run.info["train/optimizer1/lr"] == 0.01


def test_max_steps_is_a_limit_in_iterations():
    names = heard(bus := Bus())
    limits = noted(bus, "before_train", "progress.max_epochs", "progress.max_iters", "run.data.total_iters")
    bridge = attach(bus, trainer := trainer_of(max_epochs=-1, max_steps=5, accumulate_grad_batches=2))
    trainer.fit(Module(), loader(3))  # two steps an epoch
    assert limits == [(None, 8, 8)]
    assert bridge.run.counters.iter == 8
    assert names.count("after_train_epoch") == 3
    assert names[-2:] == ["after_train", "after_run"]


def test_validate_and_test_alone():
    names = heard(bus := Bus())
    metrics = noted(bus, "after_epoch", "metrics")
    outputs = noted(bus, "after_val_iter", "outputs")
    attach(bus, trainer := trainer_of())
    module = Module()
    (val,) = trainer.validate(module, loader(1), verbose=False)
    (test,) = trainer.test(module, loader(1), verbose=False)
    assert metrics == [val, test]
    assert outputs == [{"size": 2}]
    assert names == ["before_run", *VAL, "after_run", "before_run", *(name.replace("val", "test") for name in VAL), "after_run"]


def test_a_stop_of_the_trainer_is_one_of_the_run():
    class Stopping(Module):
        def on_train_batch_end(self, *args):
            self.trainer.should_stop = True

    names = heard(bus := Bus())
    bridge = attach(bus, trainer := trainer_of())
    trainer.fit(Stopping(), loader())
    assert names.count("after_train_iter") == 1
    assert names[-2:] == ["after_train", "after_run"]
    assert "should_stop" in bridge.run.info["stop_reason"]


def test_the_rest_of_an_epoch_that_the_module_skips():
    class Skipping(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    names = heard(bus := Bus())
    attach(bus, trainer := trainer_of())
    trainer.fit(Skipping(), loader())
    assert names.count("after_train_iter") == names.count("after_train_epoch") == 2


CALLS = ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end")  # fmt: skip


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_in_another_callback_ends_the_run_once(name, before):
    names = heard(bus := Bus())
    other = type("Other", (pl.Callback,), {name: fails(ValueError(name))})()
    trainer = trainer_of(callbacks=[other] if before else [])
    bridge = attach(bus, trainer)
    if not before:
        trainer.callbacks.append(other)
    with pytest.raises(ValueError, match=name):
        trainer.fit(Module(), loader(1), loader(1))
    assert names.count("on_exception") == (not before or name != "on_train_start")
    assert "after_run" not in names
    assert bridge.running is None
    assert bus.state == "idle"


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("names", [[], ["after_train_iter"], ["before_train_epoch"]])
def test_a_batch_that_is_none_is_counted_and_left_out(names):
    numbers, seen = iter(range(8)), []

    def collate(samples):
        return None if next(numbers) in (0, 2, 3) else torch.utils.data.default_collate(samples)

    bus = Bus()
    for name in names:
        bus.on(name, lambda event: seen.append(event.progress.iter))
    bridge = attach(bus, trainer := trainer_of(max_epochs=1))
    trainer.fit(Module(), DataLoader(loader().dataset, 2, collate_fn=collate), loader(1))
    assert seen == {"after_train_iter": [1], "before_train_epoch": [0]}.get("".join(names), [])
    counters = bridge.run.counters
    assert (counters.iter, counters.update, counters.epoch, counters.validations) == (4, trainer.global_step, 1, 1)


class Fetching(Module):
    """Steps that take their batches from the loader's iterator themselves."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    def validation_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return {"size": len(batch[0])}


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(loader(3).dataset)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("data", [loader(3), DataLoader(Unsized(), 2)], ids=["sized", "unsized"])
def test_steps_that_fetch_their_batches_themselves(data):
    """The batch is known after such a step, and the end of an unsized loader only in the step that finds no batch."""
    names = heard(bus := Bus())
    before = noted(bus, "before_train_iter", "batch")
    seen = noted(bus, "after_train_iter", "progress.epoch", "progress.iter", "batch")
    bridge = attach(bus, trainer := trainer_of(limit_val_batches=0))
    trainer.fit(module := Fetching(), data, data)
    assert [(epoch, index) for epoch, index, _ in seen] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert all(torch.equal(batch[0], own[0]) for (_, _, batch), own in zip(seen, [*loader(3), *loader(3)], strict=True))
    assert set(before) == {None}
    counters = bridge.run.counters
    assert (counters.epoch, counters.iter, counters.update) == (2, 6, trainer.global_step)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, data, verbose=False)
    assert names.count("after_val_iter") == 3
    assert names[-3:] == ["after_val_epoch", "after_val", "after_run"]


# ---------------------------------------------------------------------------------------------------------- our hooks


@pytest.mark.parametrize("weights_only", [False, True])
def test_averages_are_validated_and_saved_also_in_the_best_checkpoint_of_lightning(tmp_path, weights_only):
    validated = []

    class Looking(Module):
        def on_validation_batch_start(self, batch, batch_idx):
            validated.append(self.net.layers[0].weight.detach().clone())

    bus = Bus(ema := EMAHook(momentum=0.1))
    after = []
    bus.on("after_val_epoch", lambda event: after.append(ema.average.swapped))
    best = callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only, save_top_k=1)
    trainer = trainer_of(tmp_path, callbacks=[best], enable_checkpointing=True)
    attach(bus, trainer)
    trainer.fit(module := Looking(), loader(), loader(1))
    saved = torch.load(best.best_model_path, weights_only=False)["state_dict"]["net.layers.0.weight"]
    assert any(torch.equal(saved, one) for one in validated)
    assert not torch.equal(module.net.layers[0].weight, validated[-1])  # the raw weights are back
    assert after == [True, True]
    validated.clear()
    (results,) = trainer.validate(module, loader(1), ckpt_path=best.best_model_path, verbose=False)
    assert torch.equal(validated[0], saved)
    assert torch.equal(module.net.layers[0].weight, saved)
    assert results["val_loss"] == pytest.approx(float(best.best_model_score))


def test_a_checkpoint_after_the_fit_has_the_state_of_the_bus_too(tmp_path):
    bus = Bus(ema := EMAHook(momentum=0.1), CheckpointHook(interval=3, by_epoch=False, max_keep_ckpts=1))
    attach(bus, trainer := trainer_of(tmp_path))
    trainer.fit(Module(), loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    saved = torch.load(tmp_path / "final.ckpt", weights_only=False)
    assert torch.equal(saved["state_dict"]["net.layers.0.weight"], ema.average.tensors["net.layers.0.weight"])
    assert saved["callbacks"]["trainbus"]["progress"]["iter"] == 8


class Frozen(Module):
    """The frozen part is not in the file, and a buffer is replaced on its way there: common recipes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.strict_loading = False

    def loss(self, batch):
        return super().loss((self.backbone(batch[0]) * self.scale, batch[1]))

    def on_save_checkpoint(self, checkpoint):
        weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if not name.startswith("backbone")}
        checkpoint["state_dict"] = weights | {"scale": weights["scale"].clone(), "more": torch.ones(1)}


def test_what_the_module_takes_out_of_a_checkpoint_stays_out(tmp_path):
    def trained(*hooks, epochs=2, ckpt_path=None):
        bus = Bus(*hooks)
        attach(bus, trainer := trainer_of(tmp_path, max_epochs=epochs))
        trainer.fit(module := Frozen(), loader(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module, torch.load(tmp_path / "last.ckpt", weights_only=False)

    _, plain = trained()
    _, averaged = trained(ema := EMAHook(momentum=0.1))
    assert list(averaged["state_dict"]) == list(plain["state_dict"])
    assert torch.equal(averaged["state_dict"]["net.layers.0.weight"], ema.average.tensors["net.layers.0.weight"])
    raw = averaged["callbacks"]["trainbus"]["ema_state_dict"]
    resumed, _ = trained(again := EMAHook(momentum=0.1), epochs=3, ckpt_path=tmp_path / "last.ckpt")
    module, _ = trained(ema := EMAHook(momentum=0.1), epochs=3)
    assert set(raw) == {name for name in averaged["state_dict"] if name.startswith("net")}
    assert_same(resumed.net.state_dict(), module.net.state_dict())
    assert_same(again.average.tensors, ema.average.tensors)


def test_averages_that_cannot_be_in_a_checkpoint_are_warned_of(tmp_path):
    class Half(Module):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {name: tensor.half() for name, tensor in checkpoint["state_dict"].items()}

    bus = Bus(ema := EMAHook(momentum=0.1))
    attach(bus, trainer := trainer_of(tmp_path))
    trainer.fit(module := Half(), loader())
    with structlog.testing.capture_logs() as logs:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        trainer.save_checkpoint(tmp_path / "b.ckpt")
    saved = torch.load(tmp_path / "b.ckpt", weights_only=False)["state_dict"]
    assert_same(saved, {name: tensor.half() for name, tensor in module.state_dict().items()})
    assert [one["weights"] for one in logs if "weights" in one] == [sorted(ema.average.tensors)]


def test_a_checkpoint_of_a_pruned_model_has_the_keys_that_it_has_without_averages(tmp_path):
    keys = []
    for bus in (None, Bus(EMAHook())):
        trainer = trainer_of(tmp_path, callbacks=[callbacks.ModelPruning("l1_unstructured", amount=0.5)])
        if bus is not None:
            attach(bus, trainer)
        trainer.fit(Module(), loader())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
        Module().load_state_dict(saved)
        keys.append([*saved])
    assert keys[0] == keys[1]


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_beside_those_of_lightning_are_refused(name):
    if not hasattr(callbacks, name):
        pytest.skip(f"{name} came with Lightning 2.6")
    options = {"swa_lrs": 0.1} if name.startswith("Stochastic") else {}
    bus = Bus(EMAHook(momentum=0.1))
    attach(bus, trainer := trainer_of(callbacks=[getattr(callbacks, name)(**options)]))
    with pytest.raises(ConfigurationError, match=name):
        trainer.fit(Module(), loader())


@pytest.mark.parametrize("theirs", [False, True])
def test_a_schedule_of_ours_steps_and_is_refused_beside_one_that_lightning_steps(theirs):
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            ours, other = (torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for _ in range(2))
            bus.add(ParamSchedulerHook(ours, by="iter"))
            return [optimizer], [{"scheduler": other, "interval": "step"}] if theirs else []

    attach(bus := Bus(), trainer := trainer_of(max_epochs=1))
    with pytest.raises(ConfigurationError, match="ParamSchedulerHook") if theirs else nullcontext():
        trainer.fit(Scheduled(), loader(4))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 if theirs else 0.1 / 4)


# ------------------------------------------------------------------------------------------------- attach and detach


def test_checkpoint_callbacks_of_lightning_save_after_our_callback_has_counted():
    trainer = trainer_of(callbacks=[callbacks.ModelSummary()], enable_checkpointing=True)
    listed = list(trainer.callbacks)
    with attach(Bus(), trainer):
        assert isinstance(trainer.callbacks[-1], callbacks.Checkpoint)
    assert trainer.callbacks == listed


def test_a_second_fit_of_a_trainer_that_goes_on_is_the_same_run(tmp_path):
    attach(Bus(RunRecordHook()), trainer := trainer_of(tmp_path, max_epochs=1))
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Module(), loader(4))
    now = ReportedRun(tmp_path)
    assert (now.epochs, now.iterations) == (2, 8)


def test_processes_that_start_from_this_one_are_refused():
    trainer = trainer_of(strategy="ddp_spawn", devices=2)
    with pytest.raises(ConfigurationError, match='strategy="ddp"'):
        attach(Bus(), trainer)
    assert trainer.callbacks == trainer_of(strategy="ddp_spawn", devices=2).callbacks


class EarlyFinder(callbacks.LearningRateFinder):
    """Look for a rate at the begin of epochs, as in Lightning's documentation."""

    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, module):
        self.lr_find(trainer, module)


@pytest.mark.parametrize(("kind", "first"), [(callbacks.LearningRateFinder, True), (EarlyFinder, True), (EarlyFinder, False)])
@pytest.mark.filterwarnings("ignore:.*Failed to compute suggestion", "ignore:The .* does not have many workers")
def test_a_finder_before_or_inside_a_training_does_not_disturb_the_run(kind, first):
    """The finder trains, saves and restores with other callbacks, and none of it is seen or changed by the bus."""

    def trained(bus, *hooks):
        finder = kind(num_training_steps=3, update_attr=False)
        trainer = trainer_of(callbacks=[finder] if first else [])
        if bus is not None:
            bus.timing = True
            bridge = attach(bus, trainer)
            bus.add(*hooks)
        if not first:
            trainer.callbacks.append(finder)
        trainer.fit(module := Module(), loader(4))
        return module, trainer, bus and bridge.run.counters

    names = heard(bus := Bus())
    plain, trainer, _ = trained(None)
    for module, same, counters in (trained(Bus()), trained(bus, ema := EMAHook(momentum=0.1))):
        assert_same(module.state_dict(), plain.state_dict())
        assert counters.iter == counters.update == same.global_step == trainer.global_step  # 8; in Lightning 2.5, 5
    steps = trainer.global_step
    assert names.count("after_train_iter") == names.count("after_optimizer_step") == names.count("after_forward") == steps
    assert names.count("before_run") == names.count("after_run") == 1
    assert "checkpoint_committed" not in names
    assert ema.average.steps == steps
    assert not any("_LRCallback" in part.name for part in bus.costs().parts)


@pytest.mark.filterwarnings("ignore:.*Failed to compute suggestion")
@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_a_tuner_after_a_fit_leaves_the_raw_weights(search):
    class Sized(Module):
        lr, batch_size = 0.01, 2

        def train_dataloader(self):
            return loader(2)

        val_dataloader = train_dataloader

    bus = Bus(EMAHook(momentum=0.1))
    attach(bus, trainer := trainer_of())
    trainer.fit(module := Sized())
    raw = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    options = {"lr_find": {"num_training": 3}, "scale_batch_size": {"max_trials": 1}}[search]
    getattr(pl.tuner.Tuner(trainer), search)(module, **options)
    assert_same(module.state_dict(), raw)


def test_a_remote_root_trains_without_a_work_dir(tmp_path):
    told = noted(bus := Bus(), "checkpoint_committed", "path")
    uploaded = noted(bus, "checkpoint_uploaded", "path")
    bridge = attach(bus, trainer := trainer_of("memory://bucket/run", enable_checkpointing=True, max_epochs=1))
    bus.add(CheckpointHook(out_dir="memory://bucket/ours", interval=1), EMAHook(momentum=0.5))
    trainer.fit(Module(), loader())
    assert (bridge.run.work_dir, bridge.run.name) == (None, "run")
    assert "memory://bucket/run/checkpoints" in {path.rpartition("/")[0] for path in told}
    assert {path.rpartition("/")[0] for path in uploaded} == {"memory://bucket/ours"}
    attach(bus, trainer := trainer_of("memory://bucket/run"))
    bus.add(CheckpointHook(name="local", interval=1))
    with pytest.raises(ConfigurationError, match=r"or give .*default_root_dir=.*memory://bucket/run"):
        trainer.fit(Module(), loader())


def test_a_root_that_is_a_url_of_a_local_folder_is_the_work_dir(tmp_path):
    told = checkpoints(bus := Bus(CheckpointHook(interval=1)))
    resumed = noted(bus, "after_load_checkpoint", "path")
    bridge = attach(bus, trainer := trainer_of(f"file://{tmp_path}/run", enable_checkpointing=True, max_epochs=1))
    trainer.fit(Module(), loader())
    assert bridge.run.work_dir == tmp_path / "run"
    assert {path.parent for path in told} == {tmp_path / "run", tmp_path / "run/checkpoints"}
    assert all(path.is_file() for path in told)
    assert not (tmp_path / "file:").exists()
    attach(bus, trainer := trainer_of(f"file://{tmp_path}/run", max_epochs=2))
    trainer.fit(Module(), loader(), ckpt_path=told[0].as_uri())
    assert resumed == [str(told[0])]


def test_the_old_name_of_the_package(tmp_path):
    old = pytest.importorskip("pytorch_lightning")

    best = old.callbacks.ModelCheckpoint(tmp_path / "theirs", monitor="val_loss")
    names = heard(bus := Bus(CheckpointHook(interval=1)))
    trainer = old.Trainer(accelerator="cpu", max_epochs=1, callbacks=[best], default_root_dir=tmp_path, **QUIET)
    bridge = attach(bus, trainer)
    assert trainer.callbacks.index(bridge) < trainer.callbacks.index(best)
    trainer.fit(module_of(old)(), loader(2), loader(1))
    assert names.count("after_train_iter") == 2
    assert names[-1] == "after_run"
    for file in (best.best_model_path, tmp_path / "epoch_1.ckpt"):
        assert torch.load(file, weights_only=False)["callbacks"]["trainbus"]["progress"]["iter"] == 2


def test_handlers_that_come_and_go_during_a_training():
    bus, seen = Bus(), []

    class Module2(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.mine = [bus.on(name, lambda event: seen.append((event.mount_point, event.progress.iter)))
                             for name in ("after_backward", "before_optimizer_step", "after_train_iter")]  # fmt: skip
            if batch_idx == 4:
                for one in self.mine:
                    one.cancel()
            return super().training_step(batch, batch_idx)

    bridge = attach(bus, trainer := trainer_of(max_epochs=1))
    trainer.fit(Module2(), loader(6))
    whole = [(name, index) for index in (2, 3) for name in ("after_backward", "before_optimizer_step", "after_train_iter")]
    assert seen == whole
    assert (bridge.run.counters.iter, bridge.run.counters.update) == (6, 6)


@pytest.mark.parametrize(("option", "way_out"), [("checkpoints", "TrainbusCheckpointIO"), ("work_dir", "default_root_dir=")])
def test_an_option_of_other_bridges_is_an_error_with_lightnings_way(option, way_out):
    with pytest.raises(ConfigurationError, match=rf"{option}=.*lightning.*{way_out}"):
        attach(Bus(), trainer_of(max_epochs=1), **{option: True})


class Line(pl.LightningModule):
    """A least-squares problem, with a schedule or without."""

    def __init__(self, *, scheduled):
        super().__init__()
        self.line, self.scheduled = nn.Linear(4, 1), scheduled

    def training_step(self, batch, batch_idx):
        return (self.line(batch) - 5).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]) if self.scheduled else optimizer


def test_a_learning_rate_sweep_puts_the_weights_back_and_refuses_a_schedule_of_lightning():
    data = DataLoader(torch.randn(160, 4, generator=torch.Generator().manual_seed(0)), 8)
    module, sweep, bus = Line(scheduled=False), LRSweepHook(1e-4, 1e2, 100), Bus()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    bus.add(sweep)
    trainer = trainer_of(max_epochs=9)
    attach(bus, trainer)
    trainer.fit(module, data)
    assert 20 < len(sweep.curve) < 100
    assert trainer.global_step == len(sweep.curve) + 1
    assert sweep.suggestion > 1e-4
    assert_same(dict(module.state_dict()), before)
    bus, trainer = Bus(LRSweepHook()), trainer_of()
    attach(bus, trainer)
    with pytest.raises(ConfigurationError, match="schedule"):
        trainer.fit(Line(scheduled=True), data)
