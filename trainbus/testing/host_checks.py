"""``HostChecks``: what every host keeps: our own loops, the toy of "Write a bridge", and all bridges.

Each check is one promise to a user, and runs a small training of a :class:`HostJob`.
"""

import asyncio
import itertools
import json
import signal
import threading
import time
from contextlib import nullcontext
from typing import ClassVar

import anyio
import pytest
import structlog
import torch

from trainbus.eventloop import Bus, ConfigurationError, RunCancelled, SubscribeError, TrainingError
from trainbus.eventloop.errors import BusStateError, CheckpointError, CheckpointValueError
from trainbus.eventloop.events import AfterTrainIter
from trainbus.hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    IterTimerHook,
    LoggerHook,
    OptimizerHook,
    ParamSchedulerHook,
    PreemptionHook,
    ProfilerHook,
    RuntimeInfoHook,
)
from trainbus.hooks.writers import JSONLinesWriter
from trainbus.observe import RunRecordHook, expensive
from trainbus.observe.record import Validation
from trainbus.observe.report.reported_run import ReportedRun
from trainbus.testing.host_job import (
    STEP,
    VAL,
    Counting,
    HostJob,
    Killed,
    Net,
    assert_same,
    at_steps,
    checkpoints,
    fails,
    heard,
    killing,
    noted,
)


def needs(*capabilities):
    """Have a check only for jobs that have these capabilities."""

    def mark(test):
        test.needs = capabilities
        return test

    return mark


def ends(names):
    """Return how the training ended."""
    return [name for name in names if name in ("on_exception", "after_train", "after_run")]


FORWARD = ["before_forward", "after_forward", "before_backward", "after_backward"]


def resumable(host, folder, accumulate=1, **options):
    """Return a job of three epochs, its bus, a hook that counts, its averages, and its runs."""
    bus = Bus(hook := Counting(), ema := EMAHook(momentum=0.1), RuntimeInfoHook())
    job = host(folder, bus, epochs=3, accumulate=accumulate, validate=host.validates, **options)
    return job, bus, hook, ema, noted(bus, "before_run", "run")


RESUMES = [
    *itertools.product(("hook", "stop", "host"), (3, 4, 6)),
    ("host at ends", 4),
]  # in the middle of an epoch, at its end


def recorded():
    return Bus(RunRecordHook(), LoggerHook(1, writers=[JSONLinesWriter(), JSONLinesWriter("mine.jsonl")]))


def lines(path):
    return path.read_text().splitlines()


class HostChecks:
    """What every host keeps, as tests for pytest. Derive a class whose name begins with ``Test``, and name your job.

        class TestToyTrainer(HostChecks):
            job = ToyJob

    A check is left out where the attributes of the job say that the host cannot have it.
    """

    job: ClassVar[type[HostJob]]

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.trained = {}
        for name in dir(HostChecks):
            if not all(getattr(cls.job, one) for one in getattr(getattr(cls, name), "needs", ())):
                setattr(cls, name, None)

    @pytest.fixture
    def host(self, tmp_path, monkeypatch):
        """The class of the job; its library may write files where it runs."""
        monkeypatch.chdir(tmp_path)
        interrupt = signal.getsignal(signal.SIGINT)
        yield self.job
        signal.signal(signal.SIGINT, interrupt)  # Lightning ignores it after the first

    # ------------------------------------------------------------------------------------------------- mount points

    def test_events_come_in_the_order_of_a_run_all_but_the_missing_ones_with_the_counts_of_the_host(self, host, tmp_path):
        names = heard(bus := Bus())
        limits = noted(bus, "before_train_epoch", "progress.max_epochs", "run.data.total_iters")
        starts = noted(bus, "before_train_iter", "progress.epoch", "batch_idx", "progress.iter", "run.data.epoch_length")
        ends = noted(bus, "after_train_iter", "batch", "run.data.last_batch")
        forward = noted(bus, "after_forward", "outputs")
        host(tmp_path, bus, epochs=2, batches=2, validate=host.validates).fit()
        epoch = ["before_train_epoch", *["before_train_iter", *FORWARD, *STEP, "after_train_iter"] * 2, "after_train_epoch"]
        epoch += VAL if host.validates else []
        expected = ["before_run", "before_train", *epoch * 2, "after_train", "after_run"]
        assert names == [name for name in expected if name not in host.missing]
        assert limits == [(2, 4)] * 2
        assert starts == [(0, 0, 0, 2), (0, 1, 1, 2), (1, 0, 2, 2), (1, 1, 3, 2)]
        assert [(host.tensors(batch)[0].shape, last) for batch, last in ends] == [((2, 4), False), ((2, 4), True)] * 2
        assert len(forward) == (0 if "after_forward" in host.missing else 4)
        assert all(outputs["loss"].requires_grad for outputs in forward)

    @needs("attaches")
    def test_a_handler_of_a_mount_point_that_never_comes_is_told_when_it_attaches(self, host, tmp_path):
        bus, (first, *others) = Bus(), [*host.missing, "after_train_iter"]
        bus.on(first, print)
        with structlog.testing.capture_logs() as logs:
            job = host(tmp_path, bus)
            for name in others:
                bus.on(name, print)
            job.bridge.detach()
            for name in others:
                bus.on(name, repr)
        told = [(one["mount_point"], one["reason"], one["handlers"]) for one in logs]
        assert told == [(name, reason, ["print"]) for name, reason in host.missing.items()]

    @needs("accumulates", "window_ends_with_epoch")
    def test_micro_batches_are_iterations_and_steps_are_updates(self, host, tmp_path):
        names = heard(bus := Bus())
        seen = noted(bus, "after_train_iter", "progress.iter", "progress.update", "run.updated", "run.data.last_batch")
        host(tmp_path, bus, epochs=1, batches=5, accumulate=2, validate=True).fit()
        updates = [0, 0, 1, 1, 2]  # the last window has one batch
        assert seen == [(index, updates[index], index in (1, 3, 4), index == 4) for index in range(5)]
        assert [name for name in names if name in STEP] == STEP * 3
        assert names.count("after_backward") == (0 if "after_backward" in host.missing else 5)

    @needs("accumulates")
    def test_the_loss_of_a_micro_batch_is_not_divided_by_the_accumulation(self, host, tmp_path):
        seen = noted(bus := Bus(), "after_train_iter", "batch", "outputs")
        host(tmp_path, bus, accumulate=4).fit()
        batch, outputs = seen[0]
        assert torch.as_tensor(outputs["loss"]).item() == pytest.approx(Net().loss(host.tensors(batch)).item())

    def test_module_events_traces_and_complete_gradients_before_a_step(self, host, tmp_path):
        bus = Bus(ProfilerHook(by_epoch=False, profile_times=2, activities="cpu", json_trace_path="trace.json"))
        seen, norms = noted(bus, "after_module_forward", "module_name"), []
        job = host(tmp_path, bus, epochs=1)
        bus.watch(job.net, "layers.0")

        @bus.on("before_optimizer_step")
        def look(event):
            norms.append(min(float(p.grad.norm()) for p in event.run.model.parameters()))

        job.fit()
        assert seen == ["layers.0"] * 4
        assert len(norms) == 4
        assert all(norms)
        assert (tmp_path / "trace.json").is_file()

    # ------------------------------------------------------------------------------------------------------- weights

    def test_not_one_bit_of_the_weights_changes(self, host, tmp_path):
        for accumulate in (1, 2) if host.accumulates else (1,):
            weights = []
            full = Bus(
                EMAHook(momentum=0.1), LoggerHook(interval=1, writers=[JSONLinesWriter()]), RuntimeInfoHook(), IterTimerHook()
            )
            full.add(CheckInvalidLossHook(), CheckpointHook(interval=3, by_epoch=False, max_keep_ckpts=1))
            for bus in (None, Bus(), full):
                folder = tmp_path / f"{accumulate}-{len(weights)}"
                job = host(folder, bus, epochs=3, batches=10, accumulate=accumulate, validate=host.validates)
                if bus is full:
                    heard(bus)
                torch.manual_seed(5)
                job.fit()
                weights.append(job.weights() | {"random": torch.rand(3)})
            assert_same(weights[1], weights[0])
            assert_same(weights[2], weights[0])

    # ---------------------------------------------------------------------------------------------- validation, metrics

    @needs("validates")
    def test_a_validation_has_the_metrics_of_the_host(self, host, tmp_path):
        seen = noted(bus := Bus(), "after_val_epoch", "progress.epoch", "progress.iter", "metrics")
        modes = noted(bus, "after_val_iter", "run.model.training")
        job = host(tmp_path, bus, validate=True)
        job.fit()
        metrics = job.evaluate()
        assert [one[:2] for one in seen[:2]] == [(1, 4), (2, 8)]
        assert seen[1][2][host.metric] == seen[2][2][host.metric] == pytest.approx(float(metrics[host.metric]))
        assert modes == [False] * 3

    @needs("validates")
    def test_an_evaluation_alone_is_a_run_of_its_own(self, host, tmp_path):
        names = heard(bus := Bus())
        job = host(tmp_path, bus, validate=True)
        job.evaluate()
        assert names == ["before_run", *VAL, "after_run"]
        names.clear()
        bus.on("before_val_iter", lambda event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.evaluate()
        assert names == ["before_run", *VAL[:3], "on_exception"]
        assert bus.state == "idle"

    @needs("validates")
    @pytest.mark.parametrize("beside", [False, True])
    def test_averages_are_validated_and_saved_and_the_training_goes_on_with_the_raw_weights(self, host, tmp_path, beside):
        ema, validated = EMAHook(momentum=0.5), []
        paths = checkpoints(bus := Bus(ema, CheckpointHook(interval=1)))
        plain = host(tmp_path / "plain", validate=True)
        plain.fit()
        look = lambda net: net.training or validated.append(net.layers[0].weight.clone())  # noqa: E731
        job = host(tmp_path / "bus", bus, validate=True, look=look, beside=beside)
        job.fit()
        assert_same(job.weights(), plain.weights())
        (name,) = (name for name in ema.average.tensors if name.endswith("layers.0.weight"))
        assert torch.equal(validated[-1], ema.average.tensors[name])
        assert torch.equal(job.stored(paths[-1])[name], ema.average.tensors[name])

    # ----------------------------------------------------------------------------------------------------------- saves

    @needs("validates")
    @pytest.mark.parametrize("beside", [False, True])
    def test_checkpoints_are_named_kept_and_committed(self, host, tmp_path, beside):
        paths = checkpoints(bus := Bus(CheckpointHook(interval=1, save_best=host.metric, rule="less", max_keep_ckpts=1)))
        job = host(tmp_path, bus, validate=True, beside=beside)
        job.fit()
        best = [name for name in job.files() if name.startswith("best_")]
        assert len(best) == 1
        assert job.files() == [*best, f"epoch_2{host.suffix}"]
        assert {path.name for path in paths} >= {f"epoch_1{host.suffix}", f"epoch_2{host.suffix}"}

    def test_two_requests_at_one_moment_are_one_save_that_is_committed_once_with_its_costs(self, host, tmp_path):
        bus, saved = Bus(timing=True), []
        paths = checkpoints(bus)
        bus.on("checkpoint_committed", lambda event: saved.append((event.progress.iter, event.bytes > 0, event.stall > 0)))
        for _ in range(2):
            bus.on("after_train_iter", lambda event: event.run.checkpoints.save(), when=lambda event: event.progress.iter == 1)
        host(tmp_path, bus).fit()
        assert paths == [tmp_path / f"iter_2{host.suffix}"]
        assert saved == [(2, True, True)]
        parts = {(part.group, part.name) for part in bus.costs().parts}
        assert {("training", "writing checkpoints"), ("training", "copying for checkpoints")} & parts

    @pytest.mark.parametrize("on_error", ["log", "raise"])
    def test_a_save_that_fails_is_told_and_ends_the_training_unless_it_is_to_be_logged(self, host, tmp_path, on_error):
        names, path, ask = heard(bus := Bus()), tmp_path / f"x{host.suffix}", {}
        if host.attaches:
            path = tmp_path / "file" / path.name
            ask["directory"] = path.parent
            path.parent.write_text("")  # where a directory would have to be
        else:
            path = path.with_stem("x" * 250)  # longer than a name may be
        told = noted(bus, "checkpoint_failed", "path")
        bus.on("after_train_epoch", lambda event: event.run.checkpoints.save(path.name, on_error=on_error, **ask), once=1)
        job = host(tmp_path, bus)
        with nullcontext() if on_error == "log" else pytest.raises((OSError, CheckpointError), match=r"file|x\."):
            job.fit()
        assert on_error == "raise" or ends(names) == ["after_train", "after_run"]
        assert told == [str(path)]

    def test_a_value_that_no_checkpoint_can_hold_is_an_error_at_the_first_update(self, host, tmp_path):
        class Bad(Counting):
            def state_dict(self):
                return {"what": object()}

        bus = Bus(hook := Bad(), CheckpointHook(interval=100))
        with pytest.raises(CheckpointValueError, match=r"Bad.*what"):
            host(tmp_path, bus).fit()
        assert len(hook.iters) <= 1

    @needs("attaches")
    def test_options_that_need_our_own_format_are_refused_at_once(self, host, tmp_path):
        best = {"save_best": "loss", "load_best_model_at_end": True}
        for options in ({"save_optimizer": False}, {"staging": "overlap"}, {"published_keys": "state_dict"}, best):
            *_, name = options
            with pytest.raises(ConfigurationError, match=name):
                host(tmp_path, Bus(CheckpointHook(interval=1, **options)), epochs=1).fit()

    # ---------------------------------------------------------------------------------------------------------- resume

    @pytest.fixture
    def wholes(self, tmp_path_factory):
        """Trainings that were never interrupted, by host and accumulation: one for all tests of a class."""

        def whole(host, accumulate):
            if accumulate not in self.trained:
                job, *rest = resumable(host, tmp_path_factory.mktemp("whole"), accumulate)
                job.fit()
                self.trained[accumulate] = job, *rest
            return self.trained[accumulate]

        return whole

    @pytest.mark.parametrize(("by", "at"), RESUMES)
    def test_a_resumed_training_goes_on_exactly(self, host, tmp_path, wholes, by, at):
        """Weights, averages, hooks and counts are those of a training that was never interrupted."""
        accumulate = 2 if host.accumulates and at == 6 else 1
        whole, _, hook, ema, (run, *_) = wholes(host, accumulate)
        every = at if "host" in by and host.saves else 0
        look = None if by == "stop" else killing(at + 1)
        cut, bus, *_ = resumable(host, tmp_path, accumulate, every=every, ends="ends" in by, look=look)
        paths = checkpoints(bus)

        @bus.on("after_train_iter", when=lambda event: event.progress.iter + 1 == at)
        def ask(event):
            if not every:
                event.run.checkpoints.save()
            if by == "stop":
                event.run.stop()

        with nullcontext() if by == "stop" else pytest.raises(Killed):
            cut.fit()
        rest, bus, counted, average, runs = resumable(host, tmp_path, accumulate)
        names = heard(bus)
        rest.fit(cut.own() if every else paths[-1])
        assert host.empty_epochs or ("before_train_epoch", "after_train_epoch") not in itertools.pairwise(names)
        assert runs[0].counters.epoch == 3
        assert counted.iters == hook.iters == [(i // 4, i, i % 4) for i in range(12)]
        if at != 4 or host.repeats_epoch_end:
            assert counted.seen == hook.seen
            assert runs[0].counters.saved() == run.counters.saved()
        assert_same(rest.weights(), whole.weights())
        assert_same(average.average.tensors, ema.average.tensors)

    @needs("saves", "resumes_without_bus")
    def test_a_checkpoint_without_a_bus_goes_on_with_its_counts_and_a_warning(self, host, tmp_path):
        plain = host(tmp_path, every=4)
        plain.fit()
        seen = noted(bus := Bus(Counting(), EMAHook()), "before_train_iter", "progress.epoch", "batch_idx", "progress.iter")
        with structlog.testing.capture_logs() as logs:
            host(tmp_path, bus, epochs=3).fit(plain.own())
        assert seen == [(2, index, 8 + index) for index in range(4)]
        assert [one for one in logs if one["log_level"] == "warning"]

    @needs("resumes_at_end")
    def test_nothing_left_to_train_is_a_run_without_a_training(self, host, tmp_path):
        paths = checkpoints(bus := Bus(CheckpointHook(interval=1)))
        host(tmp_path, bus, epochs=1).fit()
        names = heard(again := Bus(CheckpointHook(interval=1)))
        host(tmp_path, again, epochs=1).fit(paths[-1])
        assert "before_train_epoch" not in names
        assert again.state == "idle"

    # ---------------------------------------------------------------------------------------- stop, pause, cancel, rates

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_stop_and_a_save_take_effect_after_the_step(self, host, tmp_path, accumulate):
        bus = Bus()
        names, runs, paths = heard(bus), noted(bus, "before_run", "run"), checkpoints(bus)

        @bus.on("after_train_iter", once=1)
        def ask(event):
            event.run.checkpoints.save()
            event.run.stop("enough")

        job = host(tmp_path, bus, accumulate=accumulate if host.accumulates else 1)
        job.fit()
        assert names.count("after_train_iter") == job.accumulate
        assert "after_train_epoch" not in names  # it was cut short
        assert ends(names) == ["after_train", "after_run"]
        assert runs[0].info["stop_reason"] == "enough"
        assert paths == [tmp_path / f"iter_{job.accumulate}{host.suffix}"]

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_a_training_that_reaches_its_end_is_recorded_as_finished(self, host, tmp_path, accumulate):
        bus = Bus()
        ends = noted(bus, "after_run", "stopped", "reason")
        host(tmp_path, bus, accumulate=accumulate if host.accumulates else 1).fit()
        assert ends == [(False, "")]

    @needs("stops_itself")
    def test_a_stop_of_the_trainer_itself_is_recorded_as_one(self, host, tmp_path):
        bus = Bus()
        ends = noted(bus, "after_run", "stopped", "reason")
        job = host(tmp_path, bus)
        bus.on("after_train_iter", lambda event: job.stop_itself(), once=2)
        job.fit()
        assert [(stopped, bool(reason)) for stopped, reason in ends] == [(True, True)]

    @needs("stops_at_begin")
    def test_a_stop_before_the_training_trains_nothing(self, host, tmp_path):
        names = heard(bus := Bus())
        bus.on("before_train", lambda event: event.run.stop())
        host(tmp_path, bus).fit()
        assert names == ["before_run", "before_train", "after_train", "after_run"]

    @needs("validates")
    def test_a_stop_in_a_validation_ends_the_training(self, host, tmp_path):
        names = heard(bus := Bus())
        bus.on("after_val_iter", lambda event: event.run.stop(), once=1)
        host(tmp_path, bus, epochs=3, validate=True).fit()
        assert (names.count("after_train_iter"), names.count("before_val")) == (4, 1)
        assert ends(names) == ["after_train", "after_run"]

    @needs("validates")
    def test_early_stopping_needs_validations_and_ends_the_training(self, host, tmp_path):
        runs = noted(bus := Bus(EarlyStoppingHook(host.metric, min_delta=1000.0, patience=2)), "before_run", "run")
        host(tmp_path, bus, epochs=9, validate=True).fit()
        assert runs[0].counters.epoch == 3
        assert host.metric in runs[0].info["stop_reason"]
        if host.knows_validations:
            bus = Bus(EarlyStoppingHook(host.metric))
            with pytest.raises(ConfigurationError, match="EarlyStoppingHook"):
                host(tmp_path, bus).fit()
            assert bus.state == "idle"

    def test_a_signal_saves_and_ends_the_training(self, host, tmp_path):
        bus = Bus(hook := PreemptionHook(exit_code=None))
        names, paths = heard(bus), checkpoints(bus)
        bus.on("after_train_iter", lambda event: event.progress.iter == 2 and signal.raise_signal(signal.SIGTERM))
        before = signal.getsignal(signal.SIGTERM)
        host(tmp_path, bus).fit()
        assert hook.received is signal.SIGTERM
        assert paths == [tmp_path / f"iter_3{host.suffix}"]
        assert ends(names) == ["after_train", "after_run"]
        assert signal.getsignal(signal.SIGTERM) is before

    def test_pause_and_cancel_work_at_the_end_of_an_iteration(self, host, tmp_path):
        bus, told = Bus(), []
        names = heard(bus)

        @bus.on("after_train_iter")
        def ask(event):
            told.append(event.progress.iter)
            if event.progress.iter == 1:
                event.run.pause()
                threading.Timer(0.1, lambda: (told.append("resumed"), event.run.unpause())).start()
            if event.progress.iter == 3:
                event.run.cancel()

        with pytest.raises(RunCancelled):
            host(tmp_path, bus).fit()
        assert told == [0, 1, "resumed", 2, 3]
        assert "after_train" not in names

    @needs("keeps_rate")
    def test_a_rate_is_that_of_the_next_step(self, host, tmp_path):
        bus, rates = Bus(), []
        bus.on("before_optimizer_step", lambda event: rates.append(event.optimizer.param_groups[0]["lr"]))
        bus.on("after_train_iter", lambda event: event.run.set_lr(0.5), once=1)
        host(tmp_path, bus, epochs=1, batches=2).fit()
        assert rates == [0.1, 0.5]

    # ------------------------------------------------------------------------------------------------------ exceptions

    @pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), StopIteration("mine")], ids=repr)
    def test_an_exception_in_the_model_is_told_first_then_scopes_are_undone(self, host, tmp_path, error):
        if isinstance(error, StopIteration) and not host.passes_stop_iteration:
            pytest.skip("its loop takes a StopIteration for an end")
        for stage in ("train", "val") if host.validates else ("train",):

            def look(net, stage=stage):
                if net.training == (stage == "train"):
                    raise error

            bus, order = Bus(), []
            names = heard(bus)
            bus.on("before_train", lambda event, order=order: event.run.defer(lambda: order.append("undone")))
            bus.on("on_exception", lambda event, order=order: order.append(event.exception))
            job = host(tmp_path / stage, bus, validate=stage == "val", look=look)
            with pytest.raises((type(error), *host.interrupts)) as caught:
                job.fit()
            assert error in (caught.value, caught.value.__context__)
            assert order == [error, "undone"]
            assert not {f"after_{stage}_iter", f"after_{stage}_epoch", "after_val", "after_train", "after_run"} & set(names)
            assert bus.state == "idle"

    @needs("validates")
    @pytest.mark.parametrize("name", ["before_run", "before_train", "after_train_iter", "after_val_epoch", "after_run"])
    def test_the_error_of_a_handler_is_raised_and_told_once(self, host, tmp_path, name):
        bus = Bus()
        bus.on(name, fails(KeyError("ours")))
        told = noted(bus, "on_exception", "error")
        with pytest.raises(KeyError, match="ours"):
            host(tmp_path, bus, epochs=1, validate="_val" in name).fit()
        assert told == ["KeyError: 'ours'"] or name in ("before_run", "after_run")
        assert len(told) <= 1
        assert bus.state == "idle"

    def test_the_error_of_an_offloaded_handler_ends_the_training(self, host, tmp_path):
        bus = Bus()
        bus.on("after_train_iter", fails(ValueError("broken")), offload="thread")
        with pytest.raises(ValueError, match="broken"):
            host(tmp_path, bus).fit()
        assert bus.state == "idle"

    # ----------------------------------------------------------------------------------------------- offload, streams

    def test_offloaded_handlers_have_had_every_event_when_the_training_ends(self, host, tmp_path):
        bus, seen = Bus(), []

        @bus.on("after_train_iter")
        async def ship(event):
            await anyio.sleep(0.001)
            seen.append(float(event.outputs["loss"]))

        host(tmp_path, bus).fit()
        assert len(seen) == 8
        assert bus.state == "idle"

    @pytest.mark.timeout(60)
    def test_a_stream_follows_a_training_in_a_thread(self, host, tmp_path):
        bus = Bus()

        async def follow():
            iters, job = [], host(tmp_path, bus)
            async with bus:
                async with bus.stream(AfterTrainIter) as events:
                    training = asyncio.create_task(asyncio.to_thread(job.fit))
                    async for event in events:
                        iters.append(event.progress.iter)
                        if event.progress.iter == 7:
                            break
                await training
            return iters

        assert asyncio.run(follow()) == list(range(8))

    # -------------------------------------------------------------------------------------------------------- our hooks

    def test_what_the_host_measures_and_hooks_report_is_logged(self, host, tmp_path):
        bus = Bus(LoggerHook(interval=1, writers=[JSONLinesWriter()]), IterTimerHook(), RuntimeInfoHook())
        runs = noted(bus, "before_run", "run")
        bus.on("after_train_iter", lambda event: event.run.report(mine=1.0), priority=0)
        host(tmp_path, bus, validate=host.validates).fit()
        lines = [json.loads(line) for line in (runs[0].work_dir / "scalars.jsonl").read_text().splitlines()]
        assert len(lines) == 8 + 2 * host.validates
        assert lines[0].keys() >= {f"train/{name}" for name in ("loss", "lr", "eta", "time", "mine")}
        if host.validates:
            assert f"val/{host.metric}" in lines[4]
            assert f"val/{host.metric}" in runs[0].info

    def test_an_invalid_loss_ends_the_training(self, host, tmp_path):
        look = at_steps({2: lambda net: net.layers[3].bias.data.fill_(float("nan"))})
        with pytest.raises(TrainingError, match="loss"):
            host(tmp_path, Bus(CheckInvalidLossHook(interval=1)), look=look).fit()

    @needs("steps_itself")
    def test_a_hook_that_steps_the_optimizers_is_refused(self, host, tmp_path):
        with pytest.raises(ConfigurationError, match="OptimizerHook"):
            host(tmp_path, Bus(OptimizerHook())).fit()

    @needs("takes_schedules")
    def test_a_schedule_of_ours_steps(self, host, tmp_path):
        job = host(tmp_path, bus := Bus(), epochs=1, batches=2)
        optimizer = getattr(job.optimizer, "optimizer", job.optimizer)
        bus.add(ParamSchedulerHook(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), by="iter"))
        job.fit()
        assert optimizer.param_groups[0]["lr"] == 0.1 / 4

    # ------------------------------------------------------------------------------------------------ attach, detach

    def test_a_second_training_is_a_run_of_its_own(self, host, tmp_path):
        names = heard(bus := Bus())
        job = host(tmp_path, bus, epochs=1)
        job.fit()
        job.again()
        assert [name for name in names if "run" in name] == ["before_run", "after_run"] * 2
        assert names.count("after_train_iter") == 8

    def test_a_bus_that_runs_a_training_takes_no_other(self, host, tmp_path):
        bus = Bus()
        other = host(tmp_path / "other", bus)
        bus.on("after_train_iter", lambda event: other.fit(), once=1)
        with pytest.raises(BusStateError, match="other"):
            host(tmp_path, bus).fit()
        assert bus.state == "idle"

    @needs("attaches")
    def test_a_trainer_has_one_bus_and_keeps_it_while_it_runs(self, host, tmp_path):
        bus = Bus()
        job = host(tmp_path, bus)
        with pytest.raises(SubscribeError, match="this bus"):
            job.attach(bus)
        with pytest.raises(SubscribeError, match="another bus"):
            job.attach(Bus())
        bridge = job.bridge
        bus.on("after_train_iter", lambda event: bridge.detach())
        with pytest.raises(TrainingError, match="detach"):
            job.fit()

    @needs("attaches")
    @pytest.mark.parametrize("trained", [False, True])
    def test_detaching_leaves_the_trainer_as_it_was(self, host, tmp_path, trained):
        job, plain = (host(tmp_path / name, validate=host.validates) for name in ("bus", "plain"))
        names, before = heard(bus := Bus()), job.parts()
        with job.attach(bus):
            if trained:
                job.fit()
        if not trained:
            assert job.parts() == before
        names.clear()
        job.again() if trained else job.fit()
        assert names == []
        if not trained:
            plain.fit()
            assert_same(job.weights(), plain.weights())

    # --------------------------------------------------------------------------------------- two trainings, one folder

    def test_a_run_records_its_settings_by_itself(self, host, tmp_path):
        job = host(tmp_path, Bus(RunRecordHook(), EMAHook(momentum=0.25)), epochs=1)
        job.fit()
        [path] = tmp_path.rglob("run.json")
        [session] = json.loads(path.read_text())["sessions"]
        parameters = sum(one.numel() for one in job.net.parameters())
        expected = {"batch_size": 2, "max_epochs": 1, "parameters": parameters, "world_size": 1}
        assert session["settings"] | expected | {"hooks.EMAHook.momentum": 0.25} == session["settings"]
        assert (session["settings"]["optimizer"], session["settings"]["lr"]) in (("SGD", 0.1), ("AdamW", 0.01))
        assert session["settings"]["precision"] in ("float32", "32-true")

    @needs("moves_files")
    def test_a_new_training_moves_the_files_of_the_earlier_run_and_says_so(self, host, tmp_path):
        host(tmp_path, recorded()).fit()
        names = ("run.json", "record.jsonl", "scalars.jsonl", "mine.jsonl")
        before = {name: (tmp_path / name).read_bytes() for name in names}
        for number in (1, 2):
            with structlog.testing.capture_logs() as logs:
                host(tmp_path, recorded(), epochs=1).fit()
            moved = [one["to"] for one in logs if one["log_level"] == "warning" and "to" in one]
            assert moved == [str(tmp_path / f"earlier-{number}")]
        assert {name: (tmp_path / "earlier-1" / name).read_bytes() for name in names} == before
        assert len(lines(tmp_path / "scalars.jsonl")) == len(lines(tmp_path / "mine.jsonl")) == 4
        now = ReportedRun(tmp_path)
        assert (len(now.story.sessions), now.epochs, now.iterations) == (1, 1, 4)

    @needs("moves_files")
    def test_a_resumed_training_goes_on_with_the_files(self, host, tmp_path):
        first = host(tmp_path, recorded(), epochs=1, every=4)
        first.fit()
        host(tmp_path, recorded()).fit(first.own())
        assert not (tmp_path / "earlier-1").exists()
        now = ReportedRun(tmp_path)
        assert (now.epochs, now.iterations, len(lines(tmp_path / "scalars.jsonl"))) == (2, 8, 8)

    @needs("validates", "evaluates")
    def test_an_evaluation_after_the_training_has_its_epoch_and_iteration(self, host, tmp_path):
        job = host(tmp_path, recorded(), validate=True)
        job.fit()
        job.evaluate()
        assert [(one.epoch, one.iter) for one in ReportedRun(tmp_path).story.of(Validation)] == [(1, 4), (2, 8), (2, 8)]

    @needs("continues")
    @pytest.mark.parametrize("interval", [2, 5])
    def test_ctrl_c_tells_how_to_continue_in_the_words_of_the_trainer(self, host, tmp_path, interval):
        bus = Bus(CheckpointHook(interval=interval, by_epoch=False))
        bus.on("before_train_iter", fails(KeyboardInterrupt), when=lambda event: event.progress.iter == 2)
        with structlog.testing.capture_logs() as logs, pytest.raises(host.interrupts):
            host(tmp_path, bus).fit()
        told, path = logs[-1]["event"] if logs else "", tmp_path / f"iter_2{host.suffix}"
        if interval == 2:
            assert told.endswith(f"continue from {path} with {host.continues.format(path)}")
        else:
            assert "continue from" not in told

    # ----------------------------------------------------------------------------------------------------------- costs

    @needs("times_callbacks")
    def test_a_slow_callback_of_the_trainer_has_its_name_in_the_costs(self, host, tmp_path):
        def slow(*_, **__):
            time.sleep(0.02)

        bus = Bus(timing=True)
        job = host(tmp_path, bus, epochs=1)
        name = job.call(slow)
        job.fit()
        seconds = {(part.group, part.name): part.seconds for part in bus.costs().parts}
        assert seconds["hook", name] >= 4 * 0.02  # sleep() never ends early
        assert any(sentence.startswith(name.partition(".")[0]) for sentence in expensive(bus.costs()))
