"""Averages of weights, and the hook that keeps, lends and saves one."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainbus.eventloop import Bus, CheckpointError, ConfigurationError, Hook, Run, TrainingError, mount
from trainbus.eventloop.checkpoint import load, save
from trainbus.hooks import (
    CheckpointHook,
    EMAHook,
    EMAIterHook,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    OptimizerHook,
    StochasticWeightAverage,
    WarmupEMA,
)

from ..failing import fails
from ..strikes import strikes_at
from .conftest import own_loop

KINDS = [WarmupEMA, ExponentialMovingAverage, StochasticWeightAverage, MomentumAnnealingEMA]


def values(number=6):
    return [torch.full((2, 3), float(step) ** 1.5) for step in range(number)]


def history(average, model, weights):
    seen = []
    for weight in weights:
        with torch.no_grad():
            model.weight.copy_(weight)
        average.update_parameters(model)
        seen.append(average.tensors["weight"].clone())
    return seen


# ------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options", "share"),
    [
        (ExponentialMovingAverage, {"momentum": 0.1}, lambda updates, averagings: 0.1),
        (StochasticWeightAverage, {}, lambda updates, averagings: 1 / (averagings + 1)),
        (MomentumAnnealingEMA, {"momentum": 0.4, "gamma": 2}, lambda updates, averagings: max(0.4, 2 / (2 + updates))),
        (WarmupEMA, {"momentum": 0.5}, lambda updates, averagings: 1 - min(0.5, (1 + averagings) / (10 + averagings))),
    ],
)
def test_the_first_update_copies_and_every_so_many_move_by_a_share(kind, options, share, interval):
    model, weights = nn.Linear(3, 2), values(24)
    seen = history(kind(model, interval=interval, **options), model, weights)
    assert torch.equal(seen[0], weights[0])
    expected = weights[0]
    for step, weight in enumerate(weights[1:], start=1):
        if step % interval == 0:
            expected = torch.lerp(expected, weight, share(step, step // interval))
        torch.testing.assert_close(seen[step], expected)


def test_buffers_are_the_models_own_unless_they_are_averaged():
    model = nn.BatchNorm1d(2)
    assert set(ExponentialMovingAverage(model).tensors) == {"weight", "bias"}
    average = ExponentialMovingAverage(model, momentum=0.5, update_buffers=True)
    assert set(average.tensors) == {"weight", "bias", "running_mean", "running_var"}  # an integer count is no average
    average.update_parameters(model)
    model.running_mean = torch.ones(2)  # also a buffer that was replaced
    average.update_parameters(model)
    assert torch.equal(average.tensors["running_mean"], torch.full((2,), 0.5))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.__setitem__(0, nn.Linear(2, 2, bias=False)),  # another parameter
        lambda model: setattr(model[0].weight, "data", torch.ones(2, 2)),  # other storage
    ],
)
def test_averages_follow_a_replaced_parameter_new_storage_under_one_and_added_modules(change):
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    average = ExponentialMovingAverage(model, momentum=0.5)
    average.update_parameters(model)
    before = average.tensors["0.weight"].clone()
    change(model)
    model.append(nn.Linear(2, 2))
    average.update_parameters(model)
    torch.testing.assert_close(average.tensors["0.weight"], 0.5 * before + 0.5 * model[0].weight.detach())
    assert "1.weight" in average.tensors


def test_all_new_storage_in_a_large_model_is_seen_within_a_few_updates():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(100)))
    average = ExponentialMovingAverage(model, momentum=0.5)
    average.update_parameters(model)
    model[70].weight.data = torch.full((2, 2), 100.0)
    for _ in range(8):
        average.update_parameters(model)
    assert (average.tensors["70.weight"] > 90).all()


def test_tied_weights_are_one_average_under_both_names_and_each_type_has_its_own():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2).double()})
    model["b"].weight = model["a"].weight
    average = ExponentialMovingAverage(model)
    average.update_parameters(model)
    average.update_parameters(model)
    assert average.tensors["a.weight"] is average.tensors["b.weight"]
    assert average.tensors["c.weight"].dtype == torch.float64


def test_swap_exchanges_storage_undoes_itself_and_there_is_no_update_in_between():
    model = nn.Linear(3, 2)
    average = ExponentialMovingAverage(model, momentum=0.5)
    history(average, model, values(3))
    raw, averaged = model.weight.data_ptr(), average.tensors["weight"].data_ptr()
    average.swap(model)
    assert (model.weight.data_ptr(), average.tensors["weight"].data_ptr()) == (averaged, raw)
    with pytest.raises(TrainingError):
        average.update_parameters(model)
    average.swap(model)
    assert model.weight.data_ptr() == raw


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_one_torch_call_for_any_number_of_parameters(kind):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    average = kind(model)
    average.update_parameters(model)
    with Calls() as calls:
        average.update_parameters(model)
    changing = [name for name in calls.names if name.endswith("_") or "copy" in name]
    assert changing == ["aten::_foreach_lerp_"]


class Calls(TorchDispatchMode):
    """Notes the names of torch's functions that are called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_state_of_an_average_alone_round_trips():
    model = nn.Linear(3, 2)
    average = ExponentialMovingAverage(model, momentum=0.3)
    history(average, model, values(3))
    other = ExponentialMovingAverage(nn.Linear(3, 2), momentum=0.3)
    other.load_state_dict(average.state_dict())
    assert other.steps == 3
    assert torch.equal(other.tensors["weight"], average.tensors["weight"])
    with pytest.raises(CheckpointError, match="bias"):
        other.load_tensors({"weight": torch.zeros(2, 3)})


# ---------------------------------------------------------------------------------------------- in a run


class Reference(Hook):
    """Averages by the formula with warm-up, after the update and before the others."""

    priority = 31

    def __init__(self, momentum, begin=1):
        self.momentum, self.begin, self.average, self.updates = momentum, begin, None, 1

    def after_train_iter(self, event):
        if not event.run.updated:
            return
        weights = [p.detach().clone() for p in event.run.model.parameters()]
        if self.average is None or event.progress.iter + 1 <= self.begin:
            self.average = weights
        else:
            share = 1 - min(1 - self.momentum, (1 + self.updates) / (10 + self.updates))
            self.average = [torch.lerp(old, new, share) for old, new in zip(self.average, weights, strict=True)]
            self.updates += 1


NOTED = {"after_train_epoch": "train", "before_val_iter": "val", "after_val": "after", "before_test_iter": "test"}


class Watch(Hook):
    """Notes the weights that validation and its neighbours see."""

    priority = 100

    def __init__(self):
        self.seen: dict[str, list[torch.Tensor]] = {}

    @mount(*NOTED)
    def note(self, event):
        self.seen[NOTED[event.mount_point]] = [p.detach().clone() for p in event.run.model.parameters()]


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_validation_test_and_checkpoints_have_the_average_and_training_the_raw_weights(job, tmp_path):
    reference, watch = Reference(0.3), Watch()
    hooks = (EMAHook(momentum=0.3), reference, watch, CheckpointHook(save_best="acc", save_last=False))
    data = {"val_data": job.batches(1), "test_data": job.batches(1), "metrics": {"acc": job.Scores(1.0, 2.0, 3.0)}}
    loop = job.loop(*hooks, work_dir=tmp_path, **data)
    loop.run()
    assert equal(watch.seen["val"], reference.average)
    assert equal(watch.seen["after"], watch.seen["train"])
    assert not equal(watch.seen["val"], watch.seen["train"])
    # This one is made in the validation, while the model has the averaged weights.
    saved = load(tmp_path / "best_acc_epoch_2.safetensors")
    names = [name for name, _ in loop.model.named_parameters()]
    assert equal([saved["state_dict"][name] for name in names], reference.average)
    assert equal([saved["ema_state_dict"][name] for name in names], watch.seen["train"])
    assert saved["state_dict"]["1.num_batches_tracked"] == 8
    loop.test()
    assert equal(watch.seen["test"], reference.average)
    assert equal(list(loop.model.parameters()), watch.seen["train"])


def test_the_average_of_a_short_training_is_as_good_as_its_weights(job):
    """With the defaults, which count on a long one."""
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    data = [*zip(inputs.split(8), (inputs.sum(1) > 0).long().split(8), strict=True)]

    def evaluate(model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}

    found = []
    for hooks in ([], [EMAHook()]):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam((model := nn.Linear(3, 2)).parameters(), lr=0.1)
        options = {"train_data": data, "val_data": data, "val_step": evaluate, "max_epochs": 3}
        found.append(job.loop(*hooks, model=model, optimizer=optimizer, **options).run()["accuracy"])
    assert found[0] > 0.85
    assert found[1] == pytest.approx(found[0], abs=0.08)


@pytest.mark.parametrize(("options", "first"), [({"begin": 6}, 6), ({"begin": 2, "by_epoch": True}, 5)])
def test_until_it_begins_the_average_is_the_weights(job, options, first):
    reference, watch = Reference(0.3, begin=first), Watch()
    loop = job.loop(EMAHook(momentum=0.3, **options), reference, watch, val_data=job.batches(1))
    loop.bus.on("after_val_epoch", lambda event: event.run.stop(), once=1, priority=100)
    loop.run()
    assert equal(watch.seen["val"], watch.seen["train"])
    loop = job.loop(EMAHook(momentum=0.3, **options), reference, watch, val_data=job.batches(1))
    loop.run()
    assert equal(watch.seen["val"], reference.average)


@pytest.mark.parametrize(
    ("options", "length", "last"),
    [
        ({"begin": 3, "by_epoch": True}, {"max_epochs": 2}, "epoch 2"),
        ({"begin": 9}, {"max_epochs": 2}, "iteration 8"),
        ({"begin": 4}, {"max_iters": 3}, "iteration 3"),
        ({"begin": 2, "by_epoch": True}, {"max_iters": 8}, "epoch 1.*by_epoch=False"),
    ],
)
def test_a_begin_beyond_the_training_is_an_error(job, options, length, last, logs):
    loop = job.loop(EMAHook(**options), **length)
    with pytest.raises(ConfigurationError, match=rf"EMAHook\(begin={options['begin']}\).*{last}"):
        loop.run()
    assert loop.counters.iter == 0
    job.loop(EMAHook(**options | {"begin": 1}), **length).run()


@pytest.mark.parametrize(
    ("options", "accumulate", "says"),
    [
        ({"momentum": 0.05}, 1, ("momentum=0.05", "20 updates", "the 8 of", "momentum=0.5 ")),
        ({"momentum": 0.5, "interval": 2}, 3, ("4 updates", "the 3 of")),
        ({"momentum": 0.3, "begin": 2, "by_epoch": True}, 1, None),
        ({"momentum": 0.2, "begin": 2, "by_epoch": True}, 1, ("5 updates", "the 4 of")),
        ({"momentum": 0.125}, 1, None),
        ({"ema_type": StochasticWeightAverage}, 1, None),
    ],
)
def test_a_horizon_beyond_the_training_is_logged_once(job, options, accumulate, says, logs):
    job.loop(OptimizerHook(accumulate=accumulate), EMAHook(**options)).run()
    said = [entry["event"] for entry in logs if entry["log_level"] == "warning" and "EMAHook" in entry["event"]]
    assert len(said) == (says is not None)
    assert all(part in said[0] for part in says or ())


def test_an_accumulation_window_is_one_update_and_without_known_optimizers_every_iteration(job):
    hook = EMAHook()
    job.loop(OptimizerHook(accumulate=3), hook).run()
    assert hook.average.steps == 4  # two windows per epoch of four batches
    own_loop(Bus(hook := EMAHook()), job.model())
    assert hook.average.steps == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_raw_weights_are_restored_after_any_end_of_a_validation(job, error):
    watch = Watch()
    loop = job.loop(EMAHook(momentum=0.3), watch, val_data=job.batches(1), val_step=fails(error), sanity=0)
    with pytest.raises(error):
        loop.run()
    assert equal(list(loop.model.parameters()), watch.seen["train"])


def test_raw_weights_are_restored_after_ctrl_c_during_a_swap(job):
    names = {"lend", "swap", "restore", "exchange", "finish", "_call"}
    files = ("ema.py", "averages.py", "pairs.py", "machine.py")

    def swaps(frame):
        return frame.f_code.co_name in names and frame.f_code.co_filename.endswith(files)

    for line in itertools.count():
        watch = Watch()
        data = {"train_data": job.batches(2), "val_data": job.batches(1), "model": nn.Linear(3, 2)}  # two tensors to swap
        loop = job.loop(EMAHook(momentum=0.3), watch, **data, max_epochs=1, sanity=0)
        struck = strikes_at(line, loop.run, swaps)
        assert equal(list(loop.model.parameters()), watch.seen["train"]), f"struck at line {line}"
        if not struck:
            break
    assert line > 20


def test_a_break_out_of_a_users_own_validation_restores_raw_weights(job):
    model, hook = job.model(), EMAHook(momentum=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = Bus(hook)
    with Run(bus, model=model, optimizer=optimizer) as run:
        for _ in run.epochs(1):
            for batch in run.train(job.batches()):
                optimizer.zero_grad()
                job.loss(model, batch).backward()
                optimizer.step()
            raw = [p.detach().clone() for p in model.parameters()]
            for _ in run.validate(job.batches()):
                assert not equal(list(model.parameters()), raw)
                break
    assert equal(list(model.parameters()), raw)
    assert hook.average.steps == 4


def test_one_of_several_models_is_named(job, tmp_path):
    models = {"g": job.model(), "d": job.model()}
    optimizer = torch.optim.SGD(models["g"].parameters(), lr=0.1)
    options = {"model": models, "optimizer": optimizer, "step": lambda models, batch: job.loss(models["g"], batch)}
    with pytest.raises(ConfigurationError, match="'g', 'd'"):
        job.loop(EMAHook(), **options).run()
    hooks = (EMAHook(model="g", momentum=0.5), EMAHook(model="d", name="ema of d"), CheckpointHook(interval=1))
    job.loop(*hooks, work_dir=tmp_path, **options).run()
    saved = load(tmp_path / "epoch_2.safetensors")
    assert job.same(saved["ema_state_dict"]["g"], job.weights(models["g"]))
    assert not job.same(saved["state_dict"]["g"], job.weights(models["g"]))
    assert set(saved["ema_state_dict"]) == set(saved["state_dict"]) == {"g", "d"}


# ----------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_resumed_run_ends_with_the_same_bits(job, tmp_path, kind, stop):
    def run(directory, *more, resume=None):
        hook = EMAHook(kind, begin=2, update_buffers=True)
        loop = job.loop(hook, CheckpointHook(interval=1), *more, work_dir=directory, val_data=job.batches(1))
        loop.run(resume=resume)
        return job.weights(loop.model), dict(hook.average.tensors) if hook.average is not None else {}

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", job.StopAfter(stop))
    rest = run(tmp_path / "parts", resume="auto")
    assert job.same(whole[0], rest[0])
    assert job.same(whole[1], rest[1])


class Fused(nn.Linear):
    """A layer whose ``state_dict`` has the halves of its weight, as torchtitan's attention has parts of a fused matrix."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.register_state_dict_post_hook(self.divide)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def divide(module, state, prefix, metadata):
        state[f"{prefix}first"], state[f"{prefix}second"] = state.pop(f"{prefix}weight").chunk(2)

    @staticmethod
    def join(module, state, prefix, *_):
        halves = [state.pop(f"{prefix}{half}") for half in ("first", "second") if f"{prefix}{half}" in state]
        if halves:
            state[f"{prefix}weight"] = torch.cat(halves)


def test_averages_of_what_a_state_dict_makes_of_a_weight_are_saved_and_resumed(tmp_path, logs):
    def run(bus, resume=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Fused(3, 4))
        return Run(bus, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), work_dir=tmp_path, resume=resume)

    def train(run, steps):
        with run:
            for _ in run.epochs(1):
                for batch in run.train([torch.ones(2, 3)] * steps):
                    (optimizer,) = run.optimizers.values()
                    optimizer.zero_grad()
                    run.model(batch).square().sum().backward()
                    optimizer.step()

    train(run(Bus(whole := EMAHook(momentum=0.3))), 4)
    bus = Bus(EMAHook(momentum=0.3), CheckpointHook(1, by_epoch=False))
    bus.on("after_train_iter", lambda event: event.run.stop(), once=2)
    first = run(bus)
    train(first, 4)
    saved = load(tmp_path / "iter_2.safetensors")
    again = run(Bus(ema := EMAHook(momentum=0.3)), tmp_path / "iter_2.safetensors")
    halves = torch.cat([saved["state_dict"]["1.first"], saved["state_dict"]["1.second"]])
    raw = torch.cat([saved["ema_state_dict"]["1.first"], saved["ema_state_dict"]["1.second"]])
    assert not torch.equal(halves, raw)
    assert torch.equal(raw, first.model[1].weight)
    train(again, 4)
    assert torch.equal(ema.average.tensors["1.weight"], whole.average.tensors["1.weight"])
    assert "average-not-in-checkpoint" not in [one.get("id") for one in logs]


@pytest.mark.parametrize("averaged", [True, False])
def test_without_an_average_in_the_checkpoint_it_warns_and_begins_with_the_weights(job, tmp_path, averaged, logs):
    """Where the run had no average, or the file has lost it: none is taken from the hook's state."""
    hooks = [EMAHook(momentum=0.3)] if averaged else []
    job.loop(*hooks, CheckpointHook(interval=1), work_dir=tmp_path, max_epochs=1).run()
    tree = load(tmp_path / "epoch_1.safetensors")
    assert ("ema_state_dict" in tree) is averaged
    tree.pop("ema_state_dict", None)
    save(tree, tmp_path / "without.safetensors")
    hook, watch = EMAHook(momentum=0.3), Watch()
    resumed = job.loop(hook, CheckpointHook(), watch, work_dir=tmp_path, max_epochs=1, val_data=job.batches(1))
    resumed.run(resume=tmp_path / "without.safetensors")
    assert any(entry.get("id") == "no-averaged-weights" for entry in logs)
    assert hook.average is None
    assert equal(watch.seen["val"], [tree["state_dict"][name] for name, _ in resumed.model.named_parameters()])


@pytest.mark.parametrize("strict", [True, False])
def test_an_average_of_another_model_is_an_error_or_partially_loaded(job, tmp_path, strict, logs):
    job.loop(EMAHook(momentum=0.3), CheckpointHook(interval=1), work_dir=tmp_path, max_epochs=1).run()
    averaged = load(tmp_path / "epoch_1.safetensors")["state_dict"]
    model = job.model()
    model[2] = nn.Linear(5, 4)
    hook, watch = EMAHook(momentum=0.3, strict_load=strict), Watch()
    loop = job.loop(hook, watch, model=model, max_epochs=1, val_data=job.batches(1))
    fresh = [p.detach().clone() for p in model[2].parameters()]
    error = pytest.raises(CheckpointError, match=r"2\.weight .*2\.bias") if strict else nullcontext()
    with error:
        loop.run(resume=tmp_path / "epoch_1.safetensors", strict=False)
    if strict:
        return
    assert equal(watch.seen["val"], [averaged[name] for name in ("0.weight", "0.bias", "1.weight", "1.bias")] + fresh)
    assert [len(entry["of another shape"]) for entry in logs if "of another shape" in entry] == [
        2,
        2,
    ]  # of average, and weights


def test_wrapper_prefixes_are_not_in_checkpoints(job, tmp_path):
    inner = job.model()
    job.loop(EMAHook(momentum=0.3), CheckpointHook(interval=1), model=nn.DataParallel(inner), work_dir=tmp_path).run()
    saved = load(tmp_path / "epoch_2.safetensors")
    assert saved["state_dict"].keys() == saved["ema_state_dict"].keys() == inner.state_dict().keys()
    assert not torch.equal(saved["state_dict"]["0.weight"], saved["ema_state_dict"]["0.weight"])


# ----------------------------------------------------------------------- several optimizers, several steps in a body


def test_a_run_saved_before_its_first_average_resumes_without_one(job, tmp_path):
    options = {"begin": 7, "momentum": 0.3}
    job.loop(EMAHook(**options), CheckpointHook(interval=1), job.StopAfter(4), work_dir=tmp_path).run()
    resumed = job.loop(hook := EMAHook(**options), work_dir=tmp_path)
    seen = []
    resumed.bus.on("before_train", lambda event: seen.append(hook.average))
    resumed.run(resume="auto")
    assert seen == [None]
    assert hook.average.steps


BODIES = {
    "generator each fifth": ("c", "c", "c", "c", "cg"),
    "critic often": ("cccg", "ccc", "g"),
    "both optimizers of the generator": ("gh", "ghgh", "h", "hgcgh"),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("own", [False, True])
def test_a_model_is_averaged_after_each_step_of_its_own_optimizers(body, own):
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    generator.init_ema, generator.update_ema = (lambda: None), (lambda: seen.append(generator.weight.detach().clone()))
    optimizers = {"c": critic.parameters(), "g": [generator.weight], "h": [generator.bias]}
    optimizers = {name: torch.optim.SGD(own, lr=0.1) for name, own in optimizers.items()}
    seen, wanted, hook = [], [], EMAHook("StochasticWeightAverage", model="generator")
    bus = Bus(EMAIterHook(model="generator") if own else hook)
    updates, every = [], []
    bus.on("before_optimizer_step", lambda event: updates.append(event.progress.update))
    bus.on("after_optimizer_step", lambda event: every.append(event.progress.update + 1), every=2)
    with Run(bus, model={"generator": generator, "critic": critic}, optimizer=optimizers) as run:
        for _ in run.epochs(1):
            for steps in run.train([*BODIES[body]]):
                stepped = set()
                for number, name in enumerate(steps):
                    if name in stepped & {"g", "h"}:  # the update before ends here
                        wanted.append(generator.weight.detach().clone())
                        stepped -= {"g", "h"}
                    stepped.add(name)
                    for parameter in (*generator.parameters(), *critic.parameters()):
                        parameter.grad = torch.full_like(parameter, number + 1.0)
                    optimizers[name].step()
                if stepped & {"g", "h"}:
                    wanted.append(generator.weight.detach().clone())
    if own:
        assert equal(seen, wanted)
    else:
        assert hook.average.steps == len(wanted)
        torch.testing.assert_close(hook.average.tensors["weight"], torch.stack(wanted).mean(0))
    assert run.progress.update == sum(max(map(steps.count, steps)) for steps in BODIES[body])
    assert every == [number + 1 for number in updates if number % 2]
