"""Weights after resuming are bitwise those of a run that was never stopped."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import shutil
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import DataLoader

from eventloop import (
    Bus,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    Hook,
    Run,
    RunCancelled,
    SeededDataset,
    load_weights,
)
from eventloop.checkpoint import load, save, write
from eventloop.training.saves.discover import peek

from .jobs import LOADERS, SAMPLES, Augmented, Job, StatefulLoader, Stream, samples, shuffled

WHOLE: dict[str, dict[str, Any]] = {}


def uninterrupted(parts, folder: Path, **options: Any) -> dict[str, Any]:
    """What a run without a save ends with; each kind is run once."""
    key = repr(sorted(options.items()))
    if key not in WHOLE:
        WHOLE[key] = Job(parts, folder / "a", **options).run().outcome
    return WHOLE[key]


def check(parts, tmp_path, mount_point, count, *, stops=False, warns=None, **options):
    """Save on the way, or stop there and save at the end; resume from that in another, which ends like one never stopped."""
    through = uninterrupted(parts, tmp_path, **options)
    saving = Job(parts, tmp_path / "b", **options)
    if stops:
        saving.at(mount_point, count, lambda run: run.stop()).save_at("after_train", 1).run()
    else:
        parts.assert_same(saving.save_at(mount_point, count).run().outcome, through)
    resumed = Job(parts, tmp_path / "c", **options)
    with pytest.warns(RuntimeWarning, match=warns) if warns else nullcontext():
        resumed.run(resume=tmp_path / "b" / "here.safetensors")
    parts.assert_same(resumed.outcome, through)
    return resumed


@pytest.mark.parametrize(
    ("mount_point", "count"),
    [
        ("before_run", 1),
        ("before_train", 1),
        ("before_train_epoch", 1),
        ("before_train_iter", 1),
        ("before_train_iter", 3),
        ("after_train_iter", 1),
        ("after_train_iter", 5),
        ("after_train_iter", 6),  # the last of its epoch
        ("before_train_epoch", 2),
        ("after_train_iter", 8),
        ("after_train_iter", 12),
        ("after_train_epoch", 1),
        ("after_train_epoch", 2),
        ("before_val", 1),
        ("before_val_epoch", 2),
        ("before_val_iter", 1),
        ("after_val_iter", 3),
        ("after_val_iter", 6),
        ("after_val_epoch", 1),
        ("after_val", 1),
        ("after_val", 2),
        ("after_train", 1),
        ("after_run", 1),
    ],
)
def test_a_resumed_run_ends_bitwise_like_one_that_was_never_stopped(parts, tmp_path, mount_point, count):
    check(parts, tmp_path, mount_point, count)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("mount_point", "count"), [("after_train_iter", 8), ("after_train_epoch", 1)])
def test_resume_finds_the_position_in_the_data_of_every_kind_of_loader(parts, tmp_path, loader, mount_point, count):
    check(parts, tmp_path, mount_point, count, loader=loader)


@pytest.mark.parametrize(
    ("mount_point", "count"),
    [
        *(("after_train_iter", 2), ("after_train_iter", 6), ("after_train_iter", 9), ("after_train_iter", 14)),
        *(("before_val_iter", 2), ("after_val_iter", 20), ("after_val", 1), ("after_val_epoch", 3)),
        *(("after_train_epoch", 1), ("after_train", 1)),
    ],
)
def test_resume_of_an_iteration_based_run_in_any_pass_over_the_data(parts, tmp_path, mount_point, count):
    check(parts, tmp_path, mount_point, count, max_iters=14, val_interval=4)


@pytest.mark.parametrize("count", [14, 13])
def test_a_run_that_is_resumed_after_its_last_iteration_ends_its_epoch(parts, tmp_path, count):
    """Also where nothing is validated, or that was done."""
    for options in ({"val_interval": 4}, {"val_interval": 4, "mount_point": "after_val_epoch", "count": 4}):
        where = {"mount_point": "after_train_iter", "count": count} | options
        resumed = check(parts, tmp_path / where["mount_point"], max_iters=14, **where)
        assert resumed.trace.names.count("after_train_epoch") == 1
        assert len(resumed.trace.of("after_train_iter")) == (14 - count if "count" not in options else 0)
        (ended,) = resumed.trace.of("after_train_epoch")
        assert (ended.progress.iter, ended.progress.stage) == (13, "train")  # that of the epoch's last iteration, as always


@pytest.mark.parametrize(
    ("loader", "count"),
    [
        *itertools.product(["seeded augmentation", "stateful without a length"], [3, 6, 8, 13]),
        *(("two workers", 6), ("two workers", 8)),  # the end of a pass over the data, and its middle
    ],
)
def test_resume_of_an_iteration_based_run_with_other_loaders(parts, tmp_path, loader, count):
    check(parts, tmp_path, "after_train_iter", count, loader=loader, max_iters=14, val_interval=4)


@pytest.mark.parametrize("count", [2, 4, 6, 7])
def test_resume_with_accumulation_continues_after_a_complete_window(parts, tmp_path, count):
    check(parts, tmp_path, "after_train_iter", count, accumulate=4)


@pytest.mark.parametrize(("mount_point", "count"), [("after_val_epoch", 1), ("after_val_iter", 1), ("after_train_iter", 3)])
def test_resume_from_a_save_in_or_before_a_validation_inside_an_accumulation_window(parts, tmp_path, mount_point, count):
    check(parts, tmp_path, mount_point, count, max_iters=8, val_interval=3, accumulate=4)


def test_an_iterable_dataset_is_read_again_with_a_warning(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(LOADERS, "stream", lambda parts: DataLoader(Stream(), batch_size=4))
    check(parts, tmp_path, "after_train_iter", 8, loader="stream", warns="reads and drops 2 batches")


class Doubling(DataLoader):
    """Changes batches on their way, as loaders do that prefetch to a device or sample a graph."""

    def __iter__(self):
        return ((inputs * 2, labels) for inputs, labels in super().__iter__())


def test_a_loader_that_changes_batches_on_their_way_is_read_again_with_a_warning(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(LOADERS, "doubling", lambda parts: Doubling(samples(), batch_size=4, shuffle=True))
    check(parts, tmp_path, "after_train_iter", 8, loader="doubling", warns="Doubling has no state_dict")


def test_resuming_reads_no_skipped_sample_of_a_map_style_dataset(parts, tmp_path, monkeypatch):
    asked = []

    class Noted(Augmented):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    monkeypatch.setitem(LOADERS, "noted", lambda parts: shuffled(dataset=SeededDataset(Noted())))
    Job(parts, tmp_path, "noted", max_epochs=1).save_at("after_train_iter", 4).run()
    asked.clear()
    Job(parts, tmp_path, "noted", max_epochs=1).run(resume=tmp_path / "here.safetensors")
    assert len(asked) == SAMPLES - 16


def test_a_stateful_loader_restores_its_own_position(parts, tmp_path, monkeypatch):
    loader = StatefulLoader(parts.batches(6), sized=False)
    monkeypatch.setitem(LOADERS, "this one", lambda parts: loader)
    Job(parts, tmp_path, "this one", max_epochs=1).save_at("after_train_iter", 4).run()
    loader.reads = 0
    Job(parts, tmp_path, "this one", max_epochs=1).run(resume=tmp_path / "here.safetensors")
    assert loader.reads == 2


def test_a_loader_is_in_no_reference_cycle_after_its_run(parts):
    """As part of one, the garbage collector would end the queues of its persistent workers first: 5 s of waiting for each."""
    loader = shuffled()
    gone = weakref.ref(loader)
    loop = parts.loop(train_data=loader)
    loop.run()
    loop.val()
    gc.disable()
    try:
        del loop, loader
        assert gone() is None
    finally:
        gc.enable()


ITER = "before_train_iter after_train_iter"
VAL = "before_val before_val_epoch 6*(before_val_iter after_val_iter) after_val_epoch after_val"


@pytest.mark.parametrize(
    ("mount_point", "count", "names", "counts"),
    [
        (
            *("after_train_iter", 8, f"before_train_epoch 4*({ITER}) after_train_epoch {VAL}"),
            [(1, 8, 2), (1, 9, 3), (1, 10, 4), (1, 11, 5)],
        ),
        (
            *("after_val_iter", 3, f"{VAL} before_train_epoch 6*({ITER}) after_train_epoch {VAL}"),  # from its start
            [(1, 6 + index, index) for index in range(6)],
        ),
        ("after_val_epoch", 2, "", []),
    ],
)
def test_events_and_counts_continue_after_resuming(parts, tmp_path, mount_point, count, names, counts):
    Job(parts, tmp_path).save_at(mount_point, count).run()
    trace = Job(parts, tmp_path).run(resume=tmp_path / "here.safetensors").trace
    assert trace.names == parts.spell(f"before_run after_load_checkpoint before_train {names} after_train after_run")
    assert [(e.progress.epoch, e.progress.iter, e.batch_idx) for e in trace.of("after_train_iter")] == counts


@pytest.mark.parametrize("options", [{}, {"max_iters": 14, "val_interval": 4}])
@pytest.mark.parametrize("mount_point", ["before_val_iter", "after_train_epoch", "after_train_iter", "before_val"])
def test_a_run_that_was_stopped_and_saved_at_its_end_resumes_bitwise(parts, tmp_path, mount_point, options):
    """The save is made in after_train, long after the stop cut something short."""
    check(parts, tmp_path, mount_point, 1, stops=True, **options)


@pytest.mark.parametrize("loader", ["shuffled", "two workers", "persistent workers", "generator of its own", "stateful"])
@pytest.mark.parametrize(("count", "options"), [(1, {}), (2, {}), (1, {"max_iters": 14, "val_interval": 4})])
def test_a_stop_before_the_first_batch_of_an_epoch_leaves_its_order_as_it_would_have_been(
    parts, tmp_path, loader, count, options
):
    """Making the iterator draws random numbers, and so does its first batch: a resumed run draws both again."""
    check(parts, tmp_path, "before_train_epoch", count, stops=True, loader=loader, **options)


def test_a_stop_in_the_last_iteration_leaves_the_last_validation_to_the_resumed_run(parts, tmp_path):
    resumed = check(parts, tmp_path, "after_train_iter", 14, stops=True, max_iters=14, val_interval=4)
    assert resumed.trace.names.count("after_val") == 1


def test_a_stopped_loop_that_runs_again_validates_first_if_that_was_cut_off(parts, tmp_path):
    job = Job(parts, tmp_path)
    stop = job.bus.on("before_val_iter", lambda e: e.run.stop())
    job.run()
    stop.cancel()
    job.trace.events.clear()
    job.run()
    assert job.trace.names[:3] == ["before_run", "before_train", "before_val"]


def test_a_finished_run_can_go_further_with_a_larger_limit(parts, tmp_path):
    Job(parts, tmp_path / "b", max_epochs=2).save_at("after_train", 1).run()
    further = Job(parts, tmp_path / "c", max_epochs=3).run(resume=tmp_path / "b" / "here.safetensors")
    parts.assert_same(further.outcome, uninterrupted(parts, tmp_path, max_epochs=3))


def test_resuming_twice_in_the_same_place_is_the_same_run(parts, tmp_path):
    """The second save is made before the resumed run has come to its data."""
    Job(parts, tmp_path / "b").save_at("after_train_iter", 8).run()
    again = Job(parts, tmp_path / "c").save_at("before_train", 1)
    again.run(resume=tmp_path / "b" / "here.safetensors")
    last = Job(parts, tmp_path / "d").run(resume=tmp_path / "c" / "here.safetensors")
    parts.assert_same(last.outcome, uninterrupted(parts, tmp_path))


def test_resume_restores_the_gradient_scaler_and_other_hooks(parts, tmp_path):
    class Counting(Hook):
        def __init__(self):
            self.count = 0

        def after_train_iter(self, event):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def job(name):
        made = Job(parts, tmp_path / name, scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
        made.bus.add(counting := Counting())
        return made, counting

    first, counted = job("a")
    first.save_at("after_train_iter", 8).run()
    second, counting = job("b")
    second.run(resume=tmp_path / "a" / "here.safetensors")
    assert counting.count == counted.count == 12
    parts.assert_same(second.outcome, first.outcome)
    assert load(tmp_path / "a" / "here.safetensors")["bus"]["hooks"]["training.update"]["scaler"]["scale"] == 4.0 * 2**4


def test_counts_of_events_without_progress_survive_a_resume(parts, tmp_path):
    job = Job(parts, tmp_path)
    job.bus.on("before_run", lambda e: None, every=2)
    job.save_at("after_train_iter", 1).run()
    assert load(tmp_path / "here.safetensors")["bus"]["publishes"]["before_run"] == 1


# --------------------------------------------------------------------------------------------- resume="auto" and paths


def test_auto_without_a_checkpoint_starts_from_the_beginning(parts, tmp_path):
    parts.assert_same(Job(parts, tmp_path / "b").run(resume="auto").outcome, uninterrupted(parts, tmp_path))


def saving_every(parts, folder: Path, iterations: int, **options: Any) -> None:
    job = Job(parts, folder, **options)
    save = lambda e: e.run.request_save(f"iter_{e.progress.iter + 1}.safetensors")  # noqa: E731
    job.bus.on("after_train_iter", save, every=iterations)
    job.run()


def test_auto_uses_the_newest_checkpoint_and_reports_a_damaged_one_and_uses_the_previous(parts, tmp_path, capfd):
    folder = tmp_path / "b"
    saving_every(parts, folder, 4)
    assert Job(parts, folder).run(resume="auto").resumed_from == folder / "iter_12.safetensors"
    parts.damage(folder / "iter_12.safetensors")
    resumed = Job(parts, folder).run(resume="auto")
    assert resumed.resumed_from == folder / "iter_8.safetensors"
    parts.assert_same(resumed.outcome, uninterrupted(parts, tmp_path))
    told = "".join(capfd.readouterr())
    assert "damaged" in told
    assert "iter_12.safetensors" in told


def test_a_path_that_is_damaged_or_missing_and_a_folder_with_only_damaged_files_are_errors(parts, tmp_path):
    Job(parts, tmp_path).save_at("after_train_iter", 1).run()
    parts.damage(tmp_path / "here.safetensors")
    for resume in (tmp_path / "here.safetensors", "auto", tmp_path):
        with pytest.raises(CheckpointDamagedError):
            Job(parts, tmp_path).run(resume=resume)
    with pytest.raises(CheckpointNotFoundError, match=r'nowhere\.safetensors.*resume="auto"') as gone:
        Job(parts, tmp_path).run(resume=tmp_path / "nowhere.safetensors")
    assert isinstance(gone.value, FileNotFoundError)


def test_auto_handles_a_last_checkpoint_naming_a_missing_file(parts, tmp_path):
    Job(parts, tmp_path).save_at("after_train_iter", 8).run()
    shutil.copy(tmp_path / "here.safetensors", tmp_path / "older.safetensors")
    (tmp_path / "here.safetensors").unlink()
    resumed = Job(parts, tmp_path).run(resume="auto")
    assert resumed.resumed_from == tmp_path / "older.safetensors"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b".", b"..", b"here.safetensor", b"nowhere/here.safetensors", b"/here.safetensors", b"x" * 5000),
        *(b"\0here.safetensors", b"\xff\xfe", b"last_checkpoint", b"here.safetensors\0\0\0"),
    ],
)
def test_auto_handles_an_invalid_last_checkpoint(parts, tmp_path, content):
    Job(parts, tmp_path, max_epochs=1).save_at("after_train_iter", 2).run()
    (tmp_path / "last_checkpoint").write_bytes(content)
    resumed = Job(parts, tmp_path, max_epochs=1).run(resume="auto")
    assert resumed.resumed_from == tmp_path / "here.safetensors"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_auto_uses_the_file_before_an_unreadable_one(parts, tmp_path, monkeypatch, number):
    saving_every(parts, tmp_path, 2, max_epochs=1)
    real = Path.open

    def refuse(self, *args, **options):
        if self.name == "iter_6.safetensors" and args == ("rb",):
            raise OSError(number, os.strerror(number))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert Job(parts, tmp_path, max_epochs=1).run(resume="auto").resumed_from == tmp_path / "iter_4.safetensors"


def test_auto_passes_over_a_file_that_was_never_a_checkpoint_of_a_run(parts, tmp_path):
    Job(parts, tmp_path, max_epochs=1).save_at("after_train_iter", 2).run()
    for name, tree in {"number": 3, "list": [1, 2], "dict": {"state_dict": {}}}.items():
        save(tree, tmp_path / f"{name}.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / "last_checkpoint").unlink()
    assert Job(parts, tmp_path, max_epochs=1).run(resume="auto").resumed_from == tmp_path / "here.safetensors"


def test_auto_needs_a_work_dir(parts):
    with pytest.raises(ConfigurationError, match="give work_dir="):
        parts.loop().run(resume="auto")


# ------------------------------------------------------------------------------------------------- another model


def save_of(parts, tmp_path, model, **options):
    bus = Bus()
    bus.on("after_train", lambda e: e.run.request_save("here.safetensors"))
    parts.loop(bus, model=model, max_epochs=1, work_dir=tmp_path, **options).run()
    return tmp_path / "here.safetensors"


def test_a_checkpoint_of_another_model_lists_the_keys_and_leaves_the_model_as_it_was(parts, tmp_path):
    path = save_of(parts, tmp_path, parts.model())
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    before = parts.weights(model)
    with pytest.raises(CheckpointError) as caught:
        parts.loop(model=model).run(resume=path)
    message = str(caught.value)
    assert "missing: 2.bias, 2.weight" in message
    assert "unexpected: 1.bias, 1.num_batches_tracked" in message
    assert "of another shape: 0.weight (saved (8, 4), here (16, 4))" in message
    parts.assert_same(dict(model.state_dict()), before)


def test_load_weights_with_strict_false_loads_matching_keys(parts, tmp_path):
    saved = load(save_of(parts, tmp_path, parts.model()))["state_dict"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 5))
    load_weights(model, saved, strict=False)
    assert torch.equal(model[0].weight, saved["0.weight"])


def test_a_run_resumed_with_strict_false_uses_matching_keys(parts, tmp_path):
    path = save_of(parts, tmp_path, parts.model())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    seen = []
    bus = Bus()
    bus.on("before_train", lambda e: seen.append(model[0].weight.detach().clone()))
    parts.loop(bus, model=model, max_epochs=2).run(resume=path, strict=False)
    assert torch.equal(seen[0], load(path)["state_dict"]["0.weight"])


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


@pytest.mark.parametrize("saved_wrapped", [True, False])
def test_names_of_wrappers_do_not_matter(parts, tmp_path, saved_wrapped):
    wrapped, plain = Wrapper(parts.model(1)), parts.model(1)
    one, other = (wrapped, plain) if saved_wrapped else (plain, wrapped)
    path = save_of(parts, tmp_path, one)
    assert "0.weight" in load(path)["state_dict"]
    parts.loop(model=other, max_epochs=1).run(resume=path)
    parts.assert_same(list(other.state_dict().values()), list(one.state_dict().values()))


def test_several_models_and_optimizers_are_saved_by_name(parts, tmp_path):
    def make():
        models = {"generator": parts.model(1), "critic": parts.model(2)}
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for name, model in models.items()}
        bus = Bus()
        bus.on("after_train_iter", lambda e: e.run.request_save("here.safetensors"), once=2)

        def both(models, batch):
            return parts.step(models["generator"], batch) + parts.step(models["critic"], batch)

        loop = parts.loop(bus, model=models, optimizer=optimizers, step=both, val_data=None, work_dir=tmp_path)
        return loop, models

    loop, models = make()
    loop.run()
    assert load(tmp_path / "here.safetensors")["state_dict"].keys() == {"generator", "critic"}
    resumed, others = make()
    resumed.run(resume=tmp_path / "here.safetensors")
    for name, model in models.items():
        parts.assert_same(dict(others[name].state_dict()), dict(model.state_dict()))


def test_a_checkpoint_of_other_models_names_them(parts, tmp_path):
    path = save_of(parts, tmp_path, parts.model())
    models = {"generator": parts.model()}
    with pytest.raises(CheckpointError, match="generator"):
        parts.loop(model=models, optimizer=torch.optim.SGD(models["generator"].parameters(), lr=0.1)).run(resume=path)


def test_resuming_from_another_file_is_an_error(parts, tmp_path):
    save({"state_dict": {}}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError):
        parts.loop().run(resume=tmp_path / "weights.safetensors")


def test_after_load_checkpoint_can_change_the_applied_state(parts, tmp_path):
    path = save_of(parts, tmp_path, parts.model())
    model = parts.model()
    bus = Bus()
    seen = []
    bus.on("after_load_checkpoint", lambda e: e.checkpoint["state_dict"]["0.bias"].fill_(7.0))
    bus.on("after_run", lambda e: seen.append(model[0].bias.detach().clone()))
    parts.loop(bus, model=model, max_epochs=1).run(resume=path)
    assert torch.equal(seen[0], torch.full((8,), 7.0))


# --------------------------------------------------------------------------------------------- bring your own loop


class Decay:
    """A schedule that does not mind when it is stepped before the optimizer, as torch's do after a resume."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def own_loop(parts, tmp_path, *, resume=None, nested=False):
    model = parts.model(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = Decay(optimizer)
    bus = Bus()
    trace = parts.Trace(bus, inside=True)
    requests = {"after_train_iter": 8, "after_train_epoch": 1, "after_val_iter": 4, "after_val": 1}
    for mount_point, count in requests.items():
        heard = []
        bus.on(
            mount_point,
            lambda e, heard=heard, count=count: (
                heard.append(e) or (len(heard) == count and e.run.request_save(f"{e.mount_point}.safetensors"))
            ),
            priority=95,
        )
    train, val = shuffled(), shuffled()
    indices, seen = [], {}
    with Run(
        bus,
        model=model,
        optimizer=optimizer,
        work_dir=tmp_path,
        seed=7,
        stateful={"schedule": schedule},
        resume=resume,
    ) as run:
        for epoch in run.epochs(2):
            indices.append(epoch)
            for batch in run.train(train):
                loss = parts.step(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
                if nested and run.progress.iter % 4 == 3:
                    seen[run.progress.iter] = copy.deepcopy(model.state_dict())
                    for val_batch in run.validate(val):
                        run.report(loss=parts.step(model, val_batch))
            for val_batch in run.validate(val):
                run.report(loss=parts.step(model, val_batch) + torch.rand(()))
            schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state(), "seen": seen}
    return state, indices, trace


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """An own loop without and with validations in its body, and the folder of its saves; each is run once."""
    folders = {nested: tmp_path_factory.mktemp(f"nested-{nested}") for nested in (False, True)}
    return {nested: (*own_loop(parts, folder, nested=nested), folder) for nested, folder in folders.items()}


@pytest.mark.parametrize(
    ("saved", "indices"),
    [("after_train_iter", [1]), ("after_train_epoch", [0, 1]), ("after_val_iter", [0, 1])],
)
def test_a_users_own_loop_resumes_bitwise(parts, tmp_path, whole, saved, indices):
    through, all_indices, _, folder = whole[False]
    assert all_indices == [0, 1]
    resumed, found, _ = own_loop(parts, tmp_path, resume=folder / f"{saved}.safetensors")
    assert found == indices
    parts.assert_same(resumed, through)


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_iters": 6}])
def test_a_users_own_loop_validates_at_last_if_a_stop_in_its_last_iteration_cut_that_off(parts, tmp_path, limits):
    def train(bus, resume=None):
        model = parts.model()
        with Run(bus, model=model, work_dir=tmp_path, resume=resume) as run:
            for _ in run.epochs(**limits):
                for _ in run.train(parts.batches(6), endless="max_iters" in limits):
                    pass
                for batch in run.validate(parts.batches(1)):
                    run.report(loss=parts.step(model, batch))

    bus = Bus()
    bus.on("after_train_iter", lambda e: e.run.stop(), once=6)
    bus.on("after_train", lambda e: e.run.request_save("here.safetensors"))
    train(bus)
    again = Bus()
    trace = parts.Trace(again)
    train(again, tmp_path / "here.safetensors")
    assert len(trace.of("after_val")) == 1
    assert trace.of("after_train_iter") == []


@pytest.mark.parametrize(("saved", "done"), [("after_val_iter", 4), ("after_train_iter", 8)])
def test_a_validation_in_the_body_of_a_users_own_loop_is_not_left_out_by_a_resume(parts, tmp_path, whole, saved, done):
    through, _, through_trace, folder = whole[True]
    resumed, _, trace = own_loop(parts, tmp_path, resume=folder / f"{saved}.safetensors", nested=True)
    seen = {iteration: weights for iteration, weights in through["seen"].items() if iteration >= done - 1}
    parts.assert_same(resumed, {**through, "seen": seen})
    assert [e.progress.iter for e in trace.of("after_train_iter")] == list(range(done, 12))
    assert [e.progress.iter for e in trace.of("after_optimizer_step")] == list(range(done, 12))
    scores = [[(e.progress.iter, e.metrics) for e in one.of("after_val_epoch")] for one in (trace, through_trace)]
    assert scores[0] == [one for one in scores[1] if one[0] >= done]


def test_a_resume_that_cannot_reach_the_validation_in_its_body_warns(parts, tmp_path):
    def train(loader, *, validates, resume=None):
        model = parts.model()
        bus = Bus()
        bus.on("before_val", lambda e: e.run.request_save("here.safetensors"), once=1)
        with capture_logs() as logs, Run(bus, model=model, work_dir=tmp_path, resume=resume) as run:
            for _ in run.epochs(max_iters=4):
                for _ in run.train(loader, endless=True):
                    if run.progress.iter == 1 and validates:
                        for batch in run.validate(parts.batches(1)):
                            run.report(loss=parts.step(model, batch))
        assert run.progress.iter == 4
        return [one["reason"] for one in logs if one["log_level"] == "warning" and "reason" in one]

    for loader, validates in ((parts.batches(3), False), (StatefulLoader(parts.batches(3)), True)):
        assert train(loader, validates=True) == []
        assert len(train(loader, validates=validates, resume=tmp_path / "here.safetensors")) == 1


def test_a_save_before_a_validation_that_the_run_does_not_know_of_warns(parts, tmp_path):
    def train(**options):
        model, bus = parts.model(), Bus()
        bus.on("after_train_iter", lambda e: e.run.request_save("here.safetensors"))
        drive = Run(bus, model=model, work_dir=tmp_path).drive()
        drive.begin_run()
        drive.begin_train()
        drive.begin_epoch()
        with capture_logs() as logs:
            drive.begin_iteration()
            drive.end_iteration(**options)
            drive.begin_evaluation("val")
            drive.end_evaluation()
        drive.end_epoch()
        drive.end_train()
        drive.end_run()
        return [one for one in logs if one["log_level"] == "warning"], peek(tmp_path / "here.safetensors").stage

    warnings, stage = train()
    assert len(warnings) == 1
    assert stage == "train"
    assert train(validates=True) == ([], "val")


def raises(error):
    raise error


ENDS = {
    "Ctrl-C": lambda e: raises(KeyboardInterrupt()),
    "an exception": lambda e: raises(ZeroDivisionError()),
    "stop": lambda e: e.run.stop(),
    "cancel": lambda e: e.run.cancel(),
}


@pytest.mark.parametrize("place", ["work dir", "out_dir", "nowhere"])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_early_tells_last_how_to_continue_if_it_can(parts, tmp_path, end, place):
    work_dir, out_dir = (None, tmp_path) if place == "out_dir" else (tmp_path, None)
    bus = Bus()
    if place != "nowhere":
        bus.on("after_train_iter", lambda e: e.run.request_save("here.safetensors", directory=out_dir), once=2)
    bus.on("after_train_iter", ENDS[end], when=lambda e: e.progress.iter == 2, priority=99)
    loop = parts.loop(bus, max_epochs=5, val_data=None, work_dir=work_dir)
    notes = []
    with capture_logs() as logs:
        try:
            loop.run()
        except (KeyboardInterrupt, ZeroDivisionError, RunCancelled) as error:
            notes = getattr(error, "__notes__", [])
    told = [text for text in [*notes, logs[-1]["event"] if logs else ""] if "here.safetensors with resume=" in text]
    way = {"work dir": '"auto"', "out_dir": f'"{tmp_path / "here.safetensors"}"', "nowhere": None}[place]
    assert [text.partition("resume=")[2] for text in told] == ([] if way is None else [way])
    assert way is None or end in ("stop", "cancel") or told == notes[-1:]


@pytest.mark.parametrize(
    ("opened", "end"),
    [
        *itertools.product(["with bus"], ["an exception", "cancel"]),
        *itertools.product(
            ["async with bus, asyncio", "async with bus, trio", "arun, asyncio", "arun, trio"],
            ["an exception", "cancel", "cancelled by the host"],
        ),
    ],
)
def test_on_a_bus_that_stays_open_the_line_names_the_file_that_is_being_written(parts, tmp_path, monkeypatch, opened, end):
    begun, go_on, asked = (threading.Event() for _ in range(3))

    def write_slowly(*arguments):
        begun.set()
        assert go_on.wait(20)
        return write(*arguments)

    def end_it(event):
        assert begun.wait(20)
        threading.Timer(0.5, go_on.set).start()
        if end in ENDS:
            ENDS[end](event)
        asked.set()
        time.sleep(0.2)

    async def train():
        async with nullcontext() if opened.startswith("arun") else bus, anyio.create_task_group() as group:
            group.start_soon(loop.arun)
            while not asked.is_set() and end not in ENDS:
                await anyio.sleep(0.01)
            if end not in ENDS:
                group.cancel_scope.cancel()

    monkeypatch.setattr("eventloop.training.saves.write.write", write_slowly)
    bus = Bus()
    bus.on("after_train_iter", lambda e: e.run.request_save("here.safetensors"), once=2)
    bus.on("after_train_iter", end_it, when=lambda e: e.progress.iter == 2, priority=99)
    loop, backend = parts.loop(bus, max_epochs=5, val_data=None, work_dir=tmp_path), opened.rpartition(" ")[2]
    notes = []
    with capture_logs() as logs:
        try:
            if backend == "bus":
                with bus:
                    loop.run()
            else:
                anyio.run(train, backend=backend)
        except* (ZeroDivisionError, RunCancelled) as errors:
            notes = getattr(errors.exceptions[0], "__notes__", [])
    assert any("here.safetensors with resume=" in text for text in [*notes, *(entry["event"] for entry in logs)])
