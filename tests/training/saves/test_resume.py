"""Weights after resuming are bitwise those of a run that was never stopped."""

import copy
import gc
import itertools
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

from trainbus.eventloop import Bus, Hook, Run, RunCancelled, SeededDataset
from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.training.rng import has_workers
from trainbus.eventloop.training.saves.discover import peek

from ...failing import fails
from .jobs import LOADERS, SAMPLES, VALIDATIONS, Augmented, Job, SizedStatefulLoader, StatefulLoader, Stream, samples, shuffled

BY_ITERS = {"max_iters": 14, "val_interval": 4}
WHOLE: dict[str, Job] = {}


def uninterrupted(parts, folder: Path, **options: Any) -> Job:
    """Return a job that has run without a save; each kind is run once."""
    key = repr(sorted(options.items()))
    if key not in WHOLE:
        WHOLE[key] = Job(parts, folder / "a", **options).run()
    return WHOLE[key]


def check(parts, tmp_path, mount_point, count, *, stops=False, warns=None, **options):
    """Save on the way, or stop there and save at the end; resume from that in another, which ends like one never stopped."""
    through = uninterrupted(parts, tmp_path, **options)
    saving = Job(parts, tmp_path / "b", **options)
    if stops:
        saving.at(mount_point, count, lambda run: run.stop()).save_at("after_train", 1).run()
    else:
        parts.assert_same(saving.save_at(mount_point, count).run().outcome, through.outcome)
    resumed = Job(parts, tmp_path / "c", **options)
    with pytest.warns(RuntimeWarning, match=warns) if warns else nullcontext():
        resumed.run(resume=tmp_path / "b" / "here.safetensors")
    parts.assert_same(resumed.outcome, through.outcome)
    assert resumed.scores.items() <= through.scores.items()
    return resumed


def cases(places: dict[str, list[int]], **options: Any) -> list[Any]:
    """Return a case for each of the events, by mount point and count, in a run with these options."""
    name = "".join(f" {option}={value}" for option, value in options.items())
    return [
        pytest.param(mount_point, count, options, id=f"{mount_point} {count}{name}")
        for mount_point, counts in places.items()
        for count in counts
    ]


PLACES = (
    {"before_run": [1], "before_train": [1], "before_train_epoch": [1, 2], "before_train_iter": [1, 3]}
    | {"after_train_iter": [1, 5, 6, 8, 12], "after_train_epoch": [1, 2]}  # the sixth iteration is the last of its epoch
    | {"before_val": [1], "before_val_epoch": [2], "before_val_iter": [1], "after_val_iter": [3, 6], "after_val_epoch": [1]}
    | {"after_val": [1, 2], "after_train": [1], "after_run": [1]}
)
IN_ANY_PASS = {"after_train_iter": [2, 6, 9, 14], "before_val_iter": [2], "after_val_iter": [20], "after_val": [1]}
IN_ANY_PASS |= {"after_val_epoch": [3], "after_train_epoch": [1], "after_train": [1]}
IN_A_WINDOW = {"after_val_epoch": [1], "after_val_iter": [1], "after_train_iter": [3]}
VALIDATED = {"after_train_iter": [7], "before_val_iter": [3], "after_val_epoch": [2]}
STOPPED = {"before_val_iter": [1], "after_train_epoch": [1], "after_train_iter": [1], "before_val": [1]}


@pytest.mark.parametrize(
    ("mount_point", "count", "options"),
    [
        *cases(PLACES),
        *cases(IN_ANY_PASS, **BY_ITERS),
        *(case for loader in LOADERS for case in cases({"after_train_iter": [8], "after_train_epoch": [1]}, loader=loader)),
        *cases({"after_train_iter": [3, 6, 8, 13]}, loader="seeded augmentation", **BY_ITERS),
        *cases({"after_train_iter": [3, 6, 8, 13]}, loader="stateful without a length", **BY_ITERS),
        *cases({"after_train_iter": [6, 8]}, loader="two workers", **BY_ITERS),  # the end of a pass over the data, its middle
        *cases({"after_train_iter": [2, 4, 6, 7]}, accumulate=4),  # it continues after a complete window
        *cases(IN_A_WINDOW, max_iters=8, val_interval=3, accumulate=4),  # in and before a validation there
    ],
)
def test_a_resumed_run_ends_bitwise_like_one_that_was_never_stopped(parts, tmp_path, mount_point, count, options):
    check(parts, tmp_path, mount_point, count, **options)


@pytest.mark.long
@pytest.mark.parametrize("validation", VALIDATIONS)
@pytest.mark.parametrize(
    ("mount_point", "count", "options"), [*cases(VALIDATED, max_epochs=3), *cases(VALIDATED, max_iters=16, val_interval=5)]
)
def test_validations_after_a_resume_are_those_of_a_run_that_was_never_stopped(
    parts, tmp_path, validation, mount_point, count, options
):
    """They have its data and its random draws."""
    loader = "generator of its own" if validation == "generator of the training" else "shuffled"
    check(parts, tmp_path, mount_point, count, loader=loader, validation=validation, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mount_point", "count", "options"),
    [
        *cases(STOPPED),
        *cases(STOPPED, **BY_ITERS),
        *(
            # Making the iterator of an epoch draws random numbers, and so does its first batch: both are drawn again.
            case
            for loader in ("shuffled", "two workers", "persistent workers", "generator of its own", "stateful")
            for counts, options in (([1, 2], {}), ([1], BY_ITERS))
            for case in cases({"before_train_epoch": counts}, loader=loader, **options)
        ),
    ],
)
def test_a_run_that_was_stopped_and_saved_at_its_end_resumes_bitwise(parts, tmp_path, mount_point, count, options):
    """The save is made in after_train, long after the stop cut something short."""
    check(parts, tmp_path, mount_point, count, stops=True, **options)


@pytest.mark.parametrize("count", [14, 13])
def test_a_run_that_is_resumed_after_its_last_iteration_ends_its_epoch(parts, tmp_path, count):
    """Also where nothing is validated, or that was done."""
    for place in (("after_train_iter", count), ("after_val_epoch", 4)):
        resumed = check(parts, tmp_path / place[0], *place, **BY_ITERS)
        assert len(resumed.trace.of("after_train_iter")) == (14 - count if place[0] == "after_train_iter" else 0)
        (ended,) = resumed.trace.of("after_train_epoch")
        assert (ended.progress.iter, ended.progress.stage) == (13, "train")  # that of the epoch's last iteration, as always


def test_a_stop_in_the_last_iteration_leaves_the_last_validation_to_the_resumed_run(parts, tmp_path):
    resumed = check(parts, tmp_path, "after_train_iter", 14, stops=True, **BY_ITERS)
    assert resumed.trace.names.count("after_val") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (("after_train_iter", 8), ("before_train", 1), {}),  # before the resumed run has come to its data
        (("after_train_iter", 7), ("after_train_iter", 1), {"validation": "both", "max_epochs": 3}),  # before it validates
    ],
)
def test_a_save_that_a_resumed_run_makes_resumes_bitwise(parts, tmp_path, first, second, options):
    Job(parts, tmp_path / "b", **options).save_at(*first).run()
    Job(parts, tmp_path / "c", **options).save_at(*second).run(resume=tmp_path / "b" / "here.safetensors")
    last = Job(parts, tmp_path / "d", **options).run(resume=tmp_path / "c" / "here.safetensors")
    parts.assert_same(last.outcome, uninterrupted(parts, tmp_path, **options).outcome)


def test_a_validation_loader_of_another_kind_starts_from_its_beginning(parts, tmp_path):
    Job(parts, tmp_path, validation="both", max_epochs=3).save_at("after_train_iter", 7).run()
    other = Job(parts, tmp_path / "again", validation="a list", max_epochs=3).run(resume=tmp_path / "here.safetensors")
    assert len(other.scores) == 2


class Doubling(DataLoader):
    """Changes batches on their way, as loaders do that prefetch to a device or sample a graph."""

    def __iter__(self):
        return ((inputs * 2, labels) for inputs, labels in super().__iter__())


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (lambda parts: DataLoader(Stream(), batch_size=4), "reads and drops 2 batches"),
        (lambda parts: Doubling(samples(), batch_size=4, shuffle=True), "Doubling has no state_dict"),
    ],
    ids=["iterable dataset", "changes batches"],
)
def test_a_loader_that_cannot_skip_is_read_again_with_a_warning(parts, tmp_path, monkeypatch, make, warns):
    monkeypatch.setitem(LOADERS, warns, make)
    check(parts, tmp_path, "after_train_iter", 8, loader=warns, warns=warns)


class Noted(Augmented):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_resuming_reads_no_skipped_sample_of_a_map_style_dataset_and_no_skipped_batch_of_a_stateful_loader(
    parts, tmp_path, monkeypatch
):
    dataset, stateful = Noted(), StatefulLoader(parts.batches(6))
    loaders = {"dataset": shuffled(dataset=SeededDataset(dataset)), "stateful": stateful}
    for (name, loader), reader, left in zip(loaders.items(), (dataset, stateful), (SAMPLES - 16, 2), strict=True):
        monkeypatch.setitem(LOADERS, name, lambda parts, loader=loader: loader)
        Job(parts, tmp_path / name, name, max_epochs=1).save_at("after_train_iter", 4).run()
        reader.reads = 0
        Job(parts, tmp_path / name, name, max_epochs=1).run(resume=tmp_path / name / "here.safetensors")
        assert reader.reads == left


def test_a_loader_is_in_no_reference_cycle_after_its_run(parts):
    """As part of one, the garbage collector would end the queues of its persistent workers first: 5 s of waiting for each."""
    loader = shuffled()
    gone = weakref.ref(loader)
    loop = parts.loop(train_data=loader)
    loop.run()
    loop.validate()
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
    parts.assert_same(further.outcome, uninterrupted(parts, tmp_path, max_epochs=3).outcome)


def test_resume_restores_the_gradient_scaler_other_hooks_and_counts_of_events(parts, tmp_path):
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
        made.bus.on("before_run", lambda e: None, every=2)
        return made, counting

    first, counted = job("a")
    first.save_at("after_train_iter", 8).run()
    second, counting = job("b")
    second.run(resume=tmp_path / "a" / "here.safetensors")
    assert counting.count == counted.count == 12
    parts.assert_same(second.outcome, first.outcome)
    saved = load(tmp_path / "a" / "here.safetensors")["bus"]
    assert saved["hooks"]["training.update"]["scaler"]["scale"] == 4.0 * 2**4
    assert saved["publishes"]["before_run"] == 1  # an event without progress


def test_auto_starts_from_the_beginning_or_from_the_newest_checkpoint(parts, tmp_path):
    first = Job(parts, tmp_path / "b").save_at("after_train_iter", 4).run(resume="auto")
    parts.assert_same(first.outcome, uninterrupted(parts, tmp_path).outcome)
    again = Job(parts, tmp_path / "b").run(resume="auto")
    assert again.resumed_from == tmp_path / "b" / "here.safetensors"
    parts.assert_same(again.outcome, first.outcome)


# --------------------------------------------------------------------------------------------- bring your own loop


def test_several_validation_loaders_in_a_users_own_loop(parts, tmp_path):
    def train(name: str, resume: Path | None = None) -> list[float]:
        first, second = VALIDATIONS["both"](None), VALIDATIONS["generator of its own"](None)
        model, bus, scores = parts.model(dropout=0.3), Bus(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        bus.on("after_train_iter", lambda e: e.run.checkpoints.save("here.safetensors"), once=4)
        with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path / name, seed=7, resume=resume) as run:
            for _ in run.epochs(3):
                for batch in run.train(parts.batches(3)):
                    parts.learn(run, batch)
                scores += [parts.evaluate(run, run.validate(loader))["loss"] for loader in (first, second)]
        assert has_workers(first)
        return scores

    whole = train("a")
    assert train("b", tmp_path / "a" / "here.safetensors") == whole[2:]


def own_loop(parts, tmp_path, *, resume=None, nested=False):
    model = parts.model(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    bus = Bus()
    trace = parts.Trace(bus, inside=True)
    for mount_point, count in {"after_train_iter": 8, "after_train_epoch": 1, "after_val_iter": 4}.items():
        parts.act_at(bus, mount_point, count, lambda e: e.run.checkpoints.save(f"{e.mount_point}.safetensors"))
    train, val = shuffled(), shuffled()
    indices, seen = [], {}
    options = {"work_dir": tmp_path, "seed": 7, "stateful": {"schedule": schedule}, "resume": resume}
    with Run(bus, model=model, optimizer=optimizer, **options) as run:
        for epoch in run.epochs(2):
            indices.append(epoch)
            for batch in run.train(train):
                parts.learn(run, batch)
                if nested and run.progress.iter % 4 == 3:
                    seen[run.progress.iter] = copy.deepcopy(model.state_dict())
                    parts.evaluate(run, run.validate(val))
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


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the schedule of a new optimizer
@pytest.mark.parametrize(("saved", "indices"), [("after_train_iter", [1]), ("after_train_epoch", [1]), ("after_val_iter", [1])])
def test_a_users_own_loop_resumes_bitwise(parts, tmp_path, whole, saved, indices):
    """A save that was requested behind the batches of an epoch is one of its whole body."""
    through, all_indices, _, folder = whole[False]
    assert all_indices == [0, 1]
    resumed, found, _ = own_loop(parts, tmp_path, resume=folder / f"{saved}.safetensors")
    assert found == indices
    parts.assert_same(resumed, through)


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_iters": 6}])
def test_a_users_own_loop_validates_at_last_if_a_stop_in_its_last_iteration_cut_that_off(parts, bus, tmp_path, limits):
    def train(bus, resume=None):
        with Run(bus, model=parts.model(), work_dir=tmp_path, resume=resume) as run:
            for _ in run.epochs(**limits):
                list(run.train(parts.batches(6), endless="max_iters" in limits))
                parts.evaluate(run, run.validate(parts.batches(1)))

    bus.on("after_train_iter", lambda e: e.run.stop(), once=6)
    bus.on("after_train", lambda e: e.run.checkpoints.save("here.safetensors"))
    train(bus)
    again = Bus()
    trace = parts.Trace(again)
    train(again, tmp_path / "here.safetensors")
    assert len(trace.of("after_val")) == 1
    assert trace.of("after_train_iter") == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("saved", "done"), [("after_val_iter", 4), ("after_train_iter", 8)])
def test_a_save_in_a_validation_behind_the_step_of_a_body_is_one_of_the_whole_body(parts, tmp_path, whole, saved, done):
    through, _, through_trace, folder = whole[True]
    resumed, _, trace = own_loop(parts, tmp_path, resume=folder / f"{saved}.safetensors", nested=True)
    seen = {iteration: weights for iteration, weights in through["seen"].items() if iteration >= done}
    parts.assert_same(resumed, {**through, "seen": seen})
    assert [e.progress.iter for e in trace.of("after_train_iter")] == list(range(done, 12))
    assert [e.progress.iter for e in trace.of("after_optimizer_step")] == list(range(done, 12))
    scores = [[(e.progress.iter, e.metrics) for e in one.of("after_val_epoch")] for one in (trace, through_trace)]
    assert scores[0] == [one for one in scores[1] if one[0] > done]


def test_a_body_that_validates_before_its_step_is_repeated_if_its_batch_can_be_read_again(parts, tmp_path):
    def train(loader, resume=None):
        bus, seen = Bus(), []
        bus.on("before_val", lambda e: e.run.checkpoints.save("here.safetensors"), once=1)
        with capture_logs() as logs, Run(bus, model=parts.model(), work_dir=tmp_path, resume=resume) as run:
            for _ in run.epochs(max_iters=4):
                for _ in run.train(loader, endless=True):
                    seen.append(run.progress.iter)
                    if run.progress.iter == 1:
                        parts.evaluate(run, run.validate(parts.batches(1)))
        assert run.progress.iter == 4
        return seen, [one["event"] for one in logs if one.get("id") == "batch-not-read-again"]

    for loader, warnings in ((parts.batches(3), 0), (SizedStatefulLoader(parts.batches(3)), 1)):
        assert train(loader) == ([0, 1, 2, 3], [])
        seen, told = train(loader, resume=tmp_path / "here.safetensors")
        assert seen == [1, 2, 3]
        assert len(told) == warnings


@pytest.mark.parametrize("validates", [True, False])
def test_a_save_behind_an_iteration_knows_the_validation_that_comes_next(parts, tmp_path, validates):
    bus = Bus()
    bus.on("after_train_iter", lambda e: e.run.checkpoints.save("here.safetensors"))
    with Run(bus, model=parts.model(), work_dir=tmp_path) as run:
        drive = run.drive()
        drive.begin_train()
        drive.begin_epoch()
        drive.begin_iteration()
        drive.end_iteration()
        if validates:
            drive.begin_evaluation("val")
            drive.end_evaluation()
        drive.end_epoch()
        drive.end_train()
    assert peek(tmp_path / "here.safetensors").stage == ("val" if validates else "train")


ENDS = {
    "Ctrl-C": fails(KeyboardInterrupt),
    "an exception": fails(ZeroDivisionError),
    "stop": lambda e: e.run.stop(),
    "cancel": lambda e: e.run.cancel(),
}


@pytest.mark.parametrize("place", ["work dir", "out_dir", "nowhere"])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_early_tells_last_how_to_continue_if_it_can(parts, bus, tmp_path, end, place, logs):
    work_dir, out_dir = (None, tmp_path) if place == "out_dir" else (tmp_path, None)
    if place != "nowhere":
        bus.on("after_train_iter", lambda e: e.run.checkpoints.save("here.safetensors", directory=out_dir), once=2)
    bus.on("after_train_iter", ENDS[end], when=lambda e: e.progress.iter == 2, priority=99)
    loop = parts.loop(bus, max_epochs=5, val_data=None, work_dir=work_dir)
    notes = []
    try:
        loop.run()
    except (KeyboardInterrupt, ZeroDivisionError, RunCancelled) as error:
        notes = getattr(error, "__notes__", [])
    told = [text for text in [*notes, logs[-1]["event"] if logs else ""] if "here.safetensors with resume=" in text]
    way = {"work dir": '"auto"', "out_dir": f'"{tmp_path / "here.safetensors"}"', "nowhere": None}[place]
    assert [text.partition("resume=")[2] for text in told] == ([] if way is None else [way])
    assert way is None or end in ("stop", "cancel") or told == notes[-1:]


@pytest.mark.long
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
def test_on_a_bus_that_stays_open_the_line_names_the_file_that_is_being_written(parts, bus, tmp_path, disk, opened, end, logs):
    asked = threading.Event()

    def end_it(event):
        assert disk.reached.wait(20)
        threading.Timer(0.5, disk.go.set).start()
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

    bus.on("after_train_iter", lambda e: e.run.checkpoints.save("here.safetensors"), once=2)
    bus.on("after_train_iter", end_it, when=lambda e: e.progress.iter == 2, priority=99)
    loop, backend = parts.loop(bus, max_epochs=5, val_data=None, work_dir=tmp_path), opened.rpartition(" ")[2]
    notes = []
    try:
        if backend == "bus":
            with bus:
                loop.run()
        else:
            anyio.run(train, backend=backend)
    except* (ZeroDivisionError, RunCancelled) as errors:
        notes = getattr(errors.exceptions[0], "__notes__", [])
    assert any("here.safetensors with resume=" in text for text in [*notes, *(entry["event"] for entry in logs)])
