"""Hooks whose offloaded methods were retired: the training goes on, saves, stops and resumes without them."""

import gc
import threading
from inspect import iscoroutinefunction

import pytest

import trainbus.observe.dashboard.watcher
import trainbus.observe.latest  # noqa: F401 - defines a hook, as the import above does
from trainbus.eventloop import Bus, Hook
from trainbus.eventloop.bus import GuestHook
from trainbus.eventloop.bus.hook import subscriptions_of
from trainbus.hooks import CheckpointHook, LoggerHook, Writer
from trainbus.hooks.mirror import Mirror

from .conftest import StopAfter, batches, make_loop, same, weights
from .test_options import required_of


def offloads(kind):
    """Return True if a class of hooks has an offloaded method; a worker of Ray is needed to try that of its hook."""
    made = subscriptions_of(kind(**required_of(kind)))
    return any(options.get("offload") or iscoroutinefunction(method) for _, method, options in made)


def catalogue(base=Hook):
    """Yield the classes of hooks of trainbus that offload something."""
    for kind in base.__subclasses__():
        yield from catalogue(kind)
        ours = kind.__module__.startswith("trainbus.") and not kind.__name__.startswith("_")
        if ours and not issubclass(kind, GuestHook | Mirror) and offloads(kind):
            yield kind


OFFLOADING = sorted(set(catalogue()), key=lambda kind: kind.__name__)


def test_the_catalogue_is_found():
    assert LoggerHook in OFFLOADING
    assert len(OFFLOADING) > 5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # which the retired method would have closed
@pytest.mark.parametrize("kind", [kind for kind in OFFLOADING if kind.__name__ != "RayTrainHook"])
def test_training_saves_stops_and_resumes_without_the_retired_half_of_a_hook(kind, tmp_path):
    def train(*others, **options):
        bus = Bus(CheckpointHook(1, by_epoch=False), hook := kind(**required_of(kind)), *others)

        @bus.on("after_train_iter", priority=1)
        def retire(event):
            for one in bus.subscriptions:
                if one.hook is hook and one.mode != "inline":
                    one.cancel()

        loop = make_loop(bus=bus, work_dir=tmp_path, val_data=batches(1), seed=0)
        loop.run(**options)
        return loop

    train(StopAfter(6))
    resumed = train(resume="auto")
    assert resumed.counters.iter == 8
    whole = make_loop(val_data=batches(1), seed=0)
    whole.run()
    assert same(weights(resumed.model), weights(whole.model))
    gc.collect()


def test_a_logger_that_hangs_three_times_does_not_end_the_run_at_the_next_checkpoint(tmp_path, logs):
    release = threading.Event()

    class Dead(Writer):
        def write_rows(self, rows):
            release.wait()

    logger = LoggerHook(1, writers=[Dead()])
    logger.timeout = 0.02
    bus = Bus(logger, CheckpointHook(1, by_epoch=False), abort_timeout=0.1)

    @bus.on("after_train_iter", priority=1)
    def wait_until_it_is_retired(event):
        if event.progress.iter == 3:
            while any(one.hook is logger and one.mode == "thread" for one in bus.subscriptions):
                pass

    loop = make_loop(bus=bus, work_dir=tmp_path)
    try:
        loop.run()
    finally:
        release.set()
    assert loop.counters.iter == 8
    assert (tmp_path / "iter_8.safetensors").exists()
    assert [log["handler"] for log in logs if log.get("id") == "handler-retired"] == ["LoggerHook.write"]
