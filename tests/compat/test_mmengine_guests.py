"""Unmodified hooks of MMEngine on our TrainLoop and Run leave what they leave in MMEngine's own Runner."""

import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what MMEngine imports
    pytest.importorskip("mmengine.runner")

from mmengine.hooks import (
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    EmptyCacheHook,
    Hook,
    IterTimerHook,
    LoggerHook,
    RuntimeInfoHook,
    SyncBuffersHook,
)
from mmengine.registry import HOOKS
from mmengine.runner import load_checkpoint

from trainbus import hooks as own_hooks
from trainbus.config import add_hooks
from trainbus.convert import load_pth
from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError

from ..failing import fails
from . import mmengine_jobs as jobs
from .mmengine_jobs import checkpoint, checkpoint_hook, default_hooks, lines, names, ours, own_loop, same, scalars, theirs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD:UserWarning"),
    # MMEngine forks; from 3.14 on Python does not by itself.
    pytest.mark.filterwarnings("ignore:Multi-processing start method `fork` is different:UserWarning"),
]


@pytest.fixture(autouse=True)
def mmengine_on_this_torch(monkeypatch):
    """Let MMEngine read its own files: it does not give weights_only=, and torch 2.6 changed the default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr("mmengine.runner.loops.time", SimpleNamespace(sleep=lambda seconds: None))  # 2 s for each pass


SCHEDULE = [
    {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 5},
    {"type": "MultiStepLR", "milestones": [2], "by_epoch": True, "end": 9},
]


def all_hooks():
    """MMEngine's default hooks, and those that change weights, decide, or free memory."""
    best = checkpoint_hook(save_best="accuracy", max_keep_ckpts=2)
    return [*default_hooks(), best, EMAHook(momentum=0.1), SyncBuffersHook(), EmptyCacheHook(after_iter=True)]


def assert_same_files(one, other):
    """Compare what two jobs left: names, log lines, scalars, and the keys and tensors of checkpoints."""
    assert names(one) == names(other)
    assert lines(one) == lines(other)
    assert scalars(one) == scalars(other)
    for name in names(one):
        if name.endswith(".pth"):
            left, right = checkpoint(one / name), checkpoint(other / name)
            assert list(left) == list(right)
            assert list(left["meta"]) == list(right["meta"])
            for key in ("epoch", "iter", "seed", "dataset_meta", "mmengine_version"):
                assert left["meta"][key] == right["meta"][key]
            if "message_hub" in left:  # not if it is published
                assert_same_hubs(left.pop("message_hub"), right.pop("message_hub"))
            del left["meta"], right["meta"]
            same(left, right)


def assert_same_hubs(one, other):
    assert one["resumed_keys"] == other["resumed_keys"]
    assert list(one["log_scalars"]) == list(other["log_scalars"])
    assert_same_scalars(one, other)
    left, right = one["runtime_info"], other["runtime_info"]
    assert list(left) == list(right)
    different = {"cfg", "experiment_name", "eta", "last_ckpt", "best_ckpt"}
    same({key: left[key] for key in left.keys() - different}, {key: right[key] for key in left.keys() - different})


def assert_same_scalars(one, other):
    for name, buffer in one["log_scalars"].items():
        if not name.endswith("time"):
            assert [list(some) for some in buffer.data] == [list(some) for some in other["log_scalars"][name].data]


def same_state(one, other):
    for key in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
        same(one[key], other[key])


# ------------------------------------------------------------------------------------------------- the same job


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "job"), [(ours, {"max_epochs": 3}), (ours, {"max_epochs": 3, "groups": 2}), (own_loop, {"max_epochs": 2})]
)
def test_all_hooks_leave_the_files_that_they_leave_in_mmengines_runner(tmp_path, run, job):
    theirs(tmp_path / "theirs", all_hooks(), param_scheduler=SCHEDULE, **job)
    run(tmp_path / "ours", all_hooks(), param_scheduler=SCHEDULE, **job)
    if job["max_epochs"] == 3:
        assert names(tmp_path / "ours") == ["best_accuracy_epoch_3.pth", "epoch_2.pth", "epoch_3.pth", "last_checkpoint"]
        assert len(scalars(tmp_path / "ours")) == 9
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


def test_iteration_based_training_leaves_the_same_files(tmp_path):
    def some():
        best = checkpoint_hook(by_epoch=False, interval=4, save_best="accuracy", published_keys=["meta", "state_dict"])
        return [*default_hooks()[:3], LoggerHook(interval=3, log_metric_by_epoch=False), best, EMAHook(begin_iter=3)]

    job = {"max_iters": 12, "val_interval": 5}
    theirs(tmp_path / "theirs", some(), **job)
    ours(tmp_path / "ours", some(), **job)
    for side in ("theirs", "ours"):
        published = [name for name in names(tmp_path / side) if "-" in name]
        assert len(published) == 2
        for name in published:  # the name has a digest of times
            (tmp_path / side / name).rename(tmp_path / side / f"{name.partition('-')[0]}-published.pth")
    assert_same_files(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ({"max_epochs": 9}, {"patience": 2, "min_delta": 0.5}),
        ({"max_iters": 60, "val_interval": 7}, {"stopping_threshold": 0.7}),
    ],
)
def test_early_stopping_stops_at_the_same_iteration(tmp_path, job, options):
    runner = theirs(tmp_path / "theirs", [EarlyStoppingHook("accuracy", **options)], **job)
    hook = EarlyStoppingHook("accuracy", **options)
    loop = ours(tmp_path / "ours", [hook], **job)
    assert 0 < loop.counters.iter < 60
    assert loop.counters.iter == runner.iter
    assert hook.best_score == runner.hooks[-1].best_score
    same(runner.model.state_dict(), loop.model.state_dict())


def test_a_test_leaves_the_same_files(tmp_path):
    _, val = jobs.loaders()
    test = {"test_dataloader": val, "test_cfg": {}, "test_evaluator": [jobs.Accuracy()], "max_epochs": 1}
    jobs.runner_of(tmp_path / "theirs", [*default_hooks(), EMAHook(momentum=0.1)], **test).test()
    loop = jobs.loop_of(tmp_path / "ours", [*default_hooks(), EMAHook(momentum=0.1)], max_epochs=1, test_data=val)
    loop.test()
    found = []
    for side in ("theirs", "ours"):
        (file,) = (tmp_path / side).glob("*/*.json")
        found.append((json.loads(file.read_text())["accuracy"], lines(tmp_path / side)))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------------ resume


@pytest.mark.long
def test_mmengines_runner_resumes_our_file_and_we_resume_its(tmp_path):
    """Four files of two epochs and their continuations end with the same weights, averages and rates."""
    whole = theirs(tmp_path / "whole", all_hooks(), max_epochs=4, param_scheduler=SCHEDULE)
    theirs(tmp_path / "theirs", all_hooks(), max_epochs=2, param_scheduler=SCHEDULE)
    ours(tmp_path / "ours", all_hooks(), max_epochs=2, param_scheduler=SCHEDULE)
    model = jobs.Net()
    our_file = str(tmp_path / "ours" / "epoch_2.pth")
    load_checkpoint(model, our_file, strict=True)
    resumed = theirs(tmp_path / "a", all_hooks(), max_epochs=4, param_scheduler=SCHEDULE, resume=our_file)
    same(whole.model.state_dict(), resumed.model.state_dict())
    tree = load_pth(tmp_path / "theirs" / "epoch_2.pth")
    loop = jobs.loop_of(tmp_path / "b", all_hooks(), max_epochs=4, param_scheduler=SCHEDULE)
    loop.bus.on("before_run", lambda event: event.run.checkpoints.apply_state(tree))
    loop.run()
    same(whole.model.state_dict(), loop.model.state_dict())
    left, right = (checkpoint(tmp_path / side / "epoch_4.pth") for side in ("whole", "b"))
    same_state(left, right)
    assert left["message_hub"]["runtime_info"]["best_score"] == right["message_hub"]["runtime_info"]["best_score"]


@pytest.mark.long
@pytest.mark.parametrize(("save", "groups"), [({"interval": 2}, 2), ({"interval": 10, "by_epoch": False}, 1)])
def test_our_own_resume_continues_guests_exactly(tmp_path, save, groups):
    def some():
        stopping = EarlyStoppingHook("accuracy", patience=50, min_delta=0.5)
        return [*all_hooks(), stopping, own_hooks.CheckpointHook(save_last=False, **save)]

    job = {"param_scheduler": SCHEDULE, "groups": groups}
    hooks = some()
    whole = ours(tmp_path / "whole", hooks, max_epochs=4, **job)
    ours(tmp_path / "cut", some(), max_epochs=3, **job)
    last = max((tmp_path / "cut").glob("*.safetensors"), key=lambda file: int(file.stem.rpartition("_")[2]))
    again = some()
    resumed = ours(tmp_path / "cut", again, max_epochs=4, resume=last, **job)
    same(whole.model.state_dict(), resumed.model.state_dict())
    left, right = (checkpoint(tmp_path / side / "epoch_4.pth") for side in ("whole", "cut"))
    same_state(left, right)
    hubs = [one["message_hub"] for one in (left, right)]
    assert_same_scalars(*hubs)
    assert hubs[0]["runtime_info"]["best_score"] == hubs[1]["runtime_info"]["best_score"]
    assert (hooks[-2].wait_count, hooks[-2].best_score) == (again[-2].wait_count, again[-2].best_score)
    assert math.isfinite(again[-2].best_score)


# ---------------------------------------------------------------------------------------------- a user's own hooks


class Records(Hook):
    """A user's own hook: helpers, generic methods, arguments, an attribute of its own on the runner."""

    priority = "ABOVE_NORMAL"

    def __init__(self):
        self.calls = []

    def before_run(self, runner):
        runner.told = []

    def before_train(self, runner):
        self.calls.append(("train", runner.max_epochs, runner.max_iters, len(runner.train_dataloader)))

    def _before_epoch(self, runner, mode="train"):
        self.calls.append((f"{mode} epoch", runner.epoch, runner.iter))

    def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode="train"):
        assert set(data_batch) == {"inputs", "labels"}
        if mode == "train":
            assert list(outputs) == ["loss", "loss_class", "spread"]
            assert runner.model.training
        else:
            assert not runner.model.training
        found = self.end_of_epoch(getattr(runner, f"{mode}_dataloader"), batch_idx)
        if self.every_n_inner_iters(batch_idx, 3) or found or self.is_last_train_iter(runner):
            self.calls.append((mode, runner.epoch, runner.iter, batch_idx, found, self.every_n_train_iters(runner, 5)))

    def after_train_epoch(self, runner):
        self.calls.append(("end", runner.epoch, runner.iter, self.is_last_train_epoch(runner), self.every_n_epochs(runner, 2)))
        runner.told.append(runner.optim_wrapper.get_lr()["lr"])
        self.calls.append(("lr", list(runner.told)))

    def after_val_epoch(self, runner, metrics=None):
        self.calls.append(("metrics", metrics, runner.val_loop.dataloader is runner.val_dataloader))

    def after_train(self, runner):
        self.calls.append(("over", runner.epoch, runner.iter, runner.model_name, runner.rank, runner.world_size))


@pytest.mark.parametrize("job", [{"max_epochs": 3}, {"max_iters": 10, "val_interval": 5}])
def test_a_hook_of_a_user_is_called_at_the_same_moments_with_the_same_arguments(tmp_path, job):
    there, here = Records(), Records()
    theirs(tmp_path / "theirs", [there], **job)
    ours(tmp_path / "ours", [here], **job)
    assert here.calls == there.calls
    if "max_epochs" in job:
        looped = Records()
        own_loop(tmp_path / "own", [looped], **job)
        assert looped.calls == there.calls


def test_a_hook_without_files_leaves_none(tmp_path):
    ours(tmp_path, [EMAHook(), Records()], max_epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_guests_see_the_weights_after_the_update_in_the_order_of_their_priorities(tmp_path, bus):
    order = []

    class Order(Hook):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if batch_idx == 0:
                gradients = [parameter.grad is not None for parameter in runner.model.parameters()]
                order.append((self.name, all(gradients)))

    bus.on("after_optimizer_step", lambda event: order.append(("step", True)), every=7, after=7)
    bus.on("after_train_iter", lambda event: order.append(("ours", True)), priority=40, every=7)
    levels = ["HIGHEST", 5, "VERY_HIGH", "HIGH", "ABOVE_NORMAL", "NORMAL", "LOWEST"]
    loop = jobs.loop_of(tmp_path, [Order(one, one) for one in reversed(levels)], max_epochs=1, bus=bus)
    loop.run()
    assert [name for name, _ in order if name not in ("step", "ours")] == levels
    assert all(stepped for _, stepped in order)


def test_only_the_methods_that_a_guest_overrides_are_called_in_iterations_and_epochs():
    bus = Bus(EMAHook())
    heard = {one.mount_point for one in bus.subscriptions}
    assert "after_train_iter" in heard
    assert not heard & {"before_train_iter", "before_val_iter", "after_val_iter"}
    assert {one.priority for one in bus.subscriptions} == {50}


# ------------------------------------------------------------------------------------------- what the runner has


def with_hook(tmp_path, method, **job):
    """Run a hook whose ``before_train_iter`` is a function of the runner."""
    asks = type("Asks", (Hook,), {"before_train_iter": lambda self, runner, *given, **named: method(runner)})
    return ours(tmp_path, [asks()], **{"max_epochs": 1, "validates": False, **job})


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda runner: runner.build_model, "build_model"),
        (lambda runner: runner.train_loop.val_interval, "train_loop.val_interval"),
        (lambda runner: runner.val_dataloader, "val_dataloader"),
    ],
)
def test_a_missing_attribute_is_an_error_that_names_it_and_the_hook(tmp_path, use, name):
    with pytest.raises(AttributeError, match=rf"Asks .*runner\.{name}:"):
        with_hook(tmp_path, use)


def test_missing_attributes_are_absent_for_hasattr_and_getattr(tmp_path):
    def asks(runner):
        assert not hasattr(runner, "build_model")
        assert getattr(runner, "ema", None) is None
        assert not hasattr(runner.train_loop, "val_interval")
        assert hasattr(runner.train_loop, "stop_training")

    with_hook(tmp_path, asks)


@pytest.mark.parametrize("name", ["model", "iter", "optim_wrapper", "train_loop.val_interval"])
def test_an_attribute_that_the_run_decides_cannot_be_set(tmp_path, name):
    *owner, last = name.split(".")
    with pytest.raises(TrainingError, match=rf"Asks .*runner\.{name} ="):
        with_hook(tmp_path, lambda runner: setattr(getattr(runner, owner[0]) if owner else runner, last, 2))


def test_without_a_work_dir_hooks_that_write_say_what_is_missing_and_several_models_are_refused():
    with pytest.raises(AttributeError, match=r"LoggerHook .*runner\.logger: .*work_dir="):
        ours(None, [RuntimeInfoHook(), IterTimerHook(), LoggerHook(interval=1)], max_epochs=1)
    models = {"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}
    with pytest.raises(AttributeError, match=r"EMAHook .*runner\.model:"), Run(Bus(EMAHook()), model=models) as run:
        for _ in run.epochs(1):
            for _ in run.train([1, 2]):
                pass


class Few(Hook):
    """A hook that overrides little: not the end of an epoch."""

    def __init__(self, priority, last, **_):
        self.priority, self.last = priority, last

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.last:
            runner.train_loop.stop_training = True


class Every(Few):
    """A hook that overrides each method, and counts its calls."""

    def __init__(self, priority, last, calls):
        super().__init__(priority, last)
        self.calls = calls


def counted(stage):
    def method(self, runner, *args, **kwargs):
        self.calls.append((stage, runner.epoch, runner.iter))
        if stage == "after_train_iter":
            super(Every, self).after_train_iter(runner, *args, **kwargs)

    return method


for _stage in Hook.stages:
    setattr(Every, _stage, counted(_stage))


@pytest.mark.long
@pytest.mark.parametrize("kinds", [(Every, Few), (Few, Every), (Every, Every)])
@pytest.mark.parametrize("job", [{"max_epochs": 3}, {"max_iters": 20, "val_interval": 6}])
def test_each_method_of_each_guest_is_called_as_often_as_by_mmengine(tmp_path, job, kinds):
    """Also with a stop in an iteration, which ends after the epoch and its validation."""

    def called(run, last, **options):
        calls = []
        hooks = [kind(priority, last, calls=calls) for kind, priority in zip(kinds, ("HIGH", "LOWEST"), strict=True)]
        run(tmp_path / run.__name__, hooks, **job, **options)
        return calls

    for last in (9, None):
        for validates in (True, False):
            here = called(ours, last, validates=validates)
            assert here == called(theirs, last, validates=validates)
            assert len({stage for stage, *_ in here}) == (14 if validates else 8)


def test_the_metrics_that_guests_name_are_checked_before_the_training(tmp_path):
    with pytest.raises(ConfigurationError, match=r"CheckpointHook .*'acuracy'.*'accuracy'"):
        ours(tmp_path, [*default_hooks(), checkpoint_hook(save_best="acuracy", rule="greater")], max_epochs=1)
    assert not list(tmp_path.glob("epoch_*"))


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    ours(tmp_path, [checkpoint_hook(filename_tmpl="only.pth")], max_epochs=1, validates=False)
    before = (tmp_path / "only.pth").read_bytes()

    monkeypatch.setattr("os.replace", fails(OSError("full")))
    with pytest.raises(Exception, match="full"):
        ours(tmp_path, [checkpoint_hook(filename_tmpl="only.pth")], max_epochs=1, validates=False)
    assert (tmp_path / "only.pth").read_bytes() == before
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".trainbus-")] == []


def test_a_checkpoint_elsewhere_is_written_by_mmengines_backend(tmp_path):
    ours(tmp_path / "run", [CheckpointHook(interval=1, out_dir=str(tmp_path / "out"))], max_epochs=1, validates=False)
    assert (tmp_path / "out" / "run" / "epoch_1.pth").is_file()


def test_a_validation_that_ends_early_leaves_the_raw_weights(tmp_path):
    model, bus = jobs.Net(), Bus()
    bus.add(EMAHook(momentum=0.5))
    optimizer = jobs.optimizer_of(model)
    train, val = jobs.loaders()

    with Run(bus, model=model, optimizer=optimizer) as run:
        for _ in run.epochs(1):
            for batch in run.train(train):
                optimizer.zero_grad()
                jobs.step(model, batch)["loss"].backward()
                optimizer.step()
            raw = {name: value.clone() for name, value in model.state_dict().items()}
            for _ in run.validate(val):
                assert not torch.equal(raw["body.0.weight"], model.state_dict()["body.0.weight"])
                break
            same(raw, dict(model.state_dict()))


def test_a_checkpoint_saved_within_a_validation_continues_exactly(tmp_path):
    def some():
        return [*default_hooks(), EMAHook(momentum=0.3), checkpoint_hook()]

    whole = ours(tmp_path / "whole", some(), max_epochs=2)
    loop = jobs.loop_of(tmp_path / "cut", some(), max_epochs=2)
    saved = []

    @loop.bus.on("after_val_iter", priority=100)
    def save(event):
        if not saved:
            saved.append(event.progress.iter)
            event.run.checkpoints.save()

    loop.run()
    (file,) = (tmp_path / "cut").glob("*.safetensors")
    resumed = ours(tmp_path / "cut", some(), max_epochs=2, resume=file)
    same(whole.model.state_dict(), resumed.model.state_dict())
    left, right = (checkpoint(tmp_path / side / "epoch_2.pth") for side in ("whole", "cut"))
    same(left["ema_state_dict"], right["ema_state_dict"])


def test_default_hooks_of_a_configuration_are_added_as_they_are_and_none_is_off(bus):
    checkpoint = {"type": "CheckpointHook", "interval": 1}
    add_hooks(bus, {"timer": {"type": "IterTimerHook"}, "logger": None, "checkpoint": checkpoint})
    assert [type(hook).__name__ for hook in bus.hooks] == ["IterTimerHook", "CheckpointHook"]


def test_a_hook_that_is_registered_in_mmengine_has_its_name_in_a_list_of_hooks(tmp_path):
    class Registered(Hook):
        def __init__(self, interval):
            self.interval = interval

    HOOKS.register_module(name="RegisteredInMMEngine", module=Registered)
    try:
        bus = Bus()
        add_hooks(bus, [{"type": "RegisteredInMMEngine", "interval": 3, "priority": "VERY_HIGH"}])
    finally:
        HOOKS.module_dict.pop("RegisteredInMMEngine")
    (guest,) = (hook.guest for hook in bus.hooks)
    assert type(guest) is Registered and guest.interval == 3


def test_a_hook_adds_to_the_meta_data_of_a_checkpoint_and_finds_it_after_a_resume(tmp_path):
    seen = []

    class Author(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            assert checkpoint["meta"]["epoch"] == runner.epoch and checkpoint["meta"]["iter"] == runner.iter
            checkpoint["meta"]["author"] = "me"

        def after_load_checkpoint(self, runner, checkpoint):
            seen.append(checkpoint["meta"])

    ours(tmp_path, [Author(), own_hooks.CheckpointHook(interval=1)], max_epochs=1)
    ours(tmp_path, [Author(), own_hooks.CheckpointHook(interval=1)], max_epochs=2, resume="auto")
    assert seen[0]["author"] == "me" and seen[0]["epoch"] == 1
