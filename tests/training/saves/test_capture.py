"""When a requested save is made, what is in it, and what a failing write does."""

import threading
from functools import partial

import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Hook, Run
from trainbus.eventloop.checkpoint import BackgroundWriter, PendingSaves, load, write

from ...failing import fails
from ...waiting import on_threads


def test_a_save_contains_the_state_after_the_last_subscriber(parts, bus, tmp_path):
    model = parts.model()
    bus.on("after_train_epoch", lambda e: e.run.checkpoints.save("here.safetensors"), priority=0)

    @bus.on("after_train_epoch", priority=100)
    def change(event):
        with torch.no_grad():
            model[0].bias.fill_(5.0)

    parts.loop(bus, model=model, val_data=None, max_epochs=1, work_dir=tmp_path).run()
    assert torch.equal(load(tmp_path / "here.safetensors")["state_dict"]["0.bias"], torch.full((8,), 5.0))


def test_two_requests_of_one_moment_are_one_write_of_what_handlers_add_that_omits_only_what_both_omit(
    parts, bus, trace, tmp_path
):
    bus.on("before_save_checkpoint", lambda e: e.checkpoint.update(extra=[1, 2]))
    for name, leave_out in (("one", ["optimizer", "info"]), ("two", ["info"])):
        bus.on("after_train_epoch", lambda e, n=name, out=leave_out: e.run.checkpoints.save(f"{n}.safetensors", leave_out=out))
    parts.loop(bus, val_data=None, max_epochs=1, work_dir=tmp_path).run()
    assert (tmp_path / "one.safetensors").samefile(tmp_path / "two.safetensors")
    assert len(trace.of("before_save_checkpoint")) == 1
    (committed,) = trace.of("checkpoint_committed")
    assert committed.names == [str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")]
    state = load(tmp_path / "one.safetensors")
    assert state["extra"] == [1, 2]
    assert "optimizer" in state
    assert "info" not in state


def test_a_save_from_another_thread(parts, bus, tmp_path):
    loop = parts.loop(bus, val_data=None, max_epochs=1, work_dir=tmp_path)
    bus.on("before_forward", lambda e: on_threads(lambda _: loop.save(), e), once=2)
    loop.run()
    assert load(tmp_path / "iter_2.safetensors")["progress"]["iter"] == 2


def test_a_save_outside_of_a_run_is_an_error(parts, bus, tmp_path):
    with pytest.raises(ConfigurationError, match="run"):
        Run(bus, model=parts.model(), work_dir=tmp_path).checkpoints.save("x.safetensors")


def test_a_save_after_the_end_of_a_run_is_an_error(parts, bus, tmp_path):
    with Run(bus, model=parts.model(), work_dir=tmp_path) as run:
        pass
    with pytest.raises(ConfigurationError, match="open run"):
        run.checkpoints.save("x.safetensors")
    run.checkpoints.wait()  # there is nothing to wait for


@pytest.mark.parametrize("options", [{"busy": "skip"}, {"leave_out": ["optimizer"]}, {"directory": "elsewhere"}])
def test_options_of_a_save_without_a_name_are_an_error(parts, bus, tmp_path, options):
    with Run(bus, model=parts.model(), work_dir=tmp_path) as run, pytest.raises(ConfigurationError, match="name"):
        run.checkpoints.save(**options)


def test_a_handler_that_refuses_a_staged_checkpoint_leaves_no_one_waiting(parts, bus, tmp_path):
    bus.on("checkpoint_staged", fails(ValueError("no")))
    bus.on("after_train_iter", lambda e: e.run.checkpoints.save("x.safetensors"), once=1)
    bus.on("on_exception", lambda e: e.run.checkpoints.wait())
    with pytest.raises(ValueError, match="no"):
        parts.loop(bus, work_dir=tmp_path).run()


def test_all_requested_saves_are_durable_when_a_run_ends_also_on_a_bus_that_stays_open(parts, bus, tmp_path):
    bus.on("after_run", lambda e: e.run.checkpoints.save())
    parts.loop(bus, max_epochs=1, work_dir=tmp_path).run()
    assert (tmp_path / "last_checkpoint").read_text() == "iter_3.safetensors"
    assert load(tmp_path / "iter_3.safetensors")["progress"]["epoch"] == 1
    with Bus() as other:
        with Run(other, model=torch.nn.Linear(2, 2), work_dir=tmp_path / "open") as run:
            list(run.train([1]))
            run.checkpoints.save("again.safetensors")
        assert (tmp_path / "open" / "last_checkpoint").read_text() == "again.safetensors"


def test_buffers_that_were_made_in_inference_mode_are_saved(parts, bus, tmp_path):
    model = parts.model()
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(2))
    bus.on("after_train_epoch", lambda e: e.run.checkpoints.save("here.safetensors"))
    parts.loop(bus, model=model, max_epochs=1, work_dir=tmp_path).run()
    assert torch.equal(load(tmp_path / "here.safetensors")["state_dict"]["scale"], torch.ones(2))


@pytest.mark.parametrize("stage", ["val", "test"])
def test_only_a_training_saves(parts, bus, trace, tmp_path, stage, logs):
    """What handlers or other threads ask for in `validate()` and `test()` is told, published and not written."""
    loop = parts.loop(bus, test_data=parts.batches(1), work_dir=tmp_path)
    bus.on(f"after_{stage}_epoch", lambda e: e.run.checkpoints.save("mine.safetensors"))
    bus.on(f"after_{stage}_iter", lambda e: loop.save(), once=1)
    (loop.validate if stage == "val" else loop.test)()
    assert not list(tmp_path.iterdir())
    assert {event.names[0] for event in trace.of("checkpoint_skipped")} == {
        str(tmp_path / "mine.safetensors"),
        str(tmp_path / "iter_0.safetensors"),
    }
    assert {entry["reason"] for entry in logs} == {"only a training saves, and this run has not trained"}


def test_an_interrupt_after_the_writer_has_taken_a_save_leaves_it_its_memory(bus, tmp_path, monkeypatch):
    taken, go = threading.Event(), threading.Event()

    def held(*arguments, **options):
        taken.set()
        assert go.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr("trainbus.eventloop.training.saves.write.write", held)
    model = torch.nn.Linear(1000, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    real = BackgroundWriter.enter

    def interrupt(writer, job, **options):
        monkeypatch.setattr(BackgroundWriter, "enter", real)
        real(writer, job, **options)
        assert taken.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundWriter, "enter", interrupt)
    with Run(bus, model=model, work_dir=tmp_path) as run:
        batches = iter(run.train([1, 2]))
        next(batches)
        run.checkpoints.save("a.safetensors")
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        run.checkpoints.check()  # copies what has changed meanwhile into free memory
        torch.nn.init.zeros_(model.weight)
        run.checkpoints.check()
        go.set()
        run.checkpoints.wait()
    assert torch.equal(load(tmp_path / "a.safetensors")["state_dict"]["weight"], torch.ones(1, 1000))


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("staging", "later", ["block", "overlap"]),
        ("busy", ["wait"], ["wait", "skip", "replace"]),
        ("busy", "drop", ["wait", "skip", "replace"]),
        ("on_error", "ignore", ["raise", "log"]),
    ],
)
def test_an_unknown_option_of_a_save_is_an_error_that_names_the_others(bus, tmp_path, option, value, others):
    with Run(bus, model=torch.nn.Linear(2, 2), work_dir=tmp_path) as run:
        next(iter(run.train([1, 2])))
        for call in (partial(run.checkpoints.save, "a"), run.checkpoints.check):
            with pytest.raises(ConfigurationError) as caught:
                call(**{option: value})
            assert all(one in str(caught.value) for one in (f"{option}={value!r}", *others))


@pytest.mark.parametrize(
    ("omitted", "omitted_later", "changed"),
    [
        *(([], ["optimizer"], None), (["optimizer"], [], None)),
        *(([], [], changed) for changed in (None, "0.1.weight", "0.1.running_mean")),
    ],
)
def test_a_file_gets_a_second_name_if_it_has_the_same_state_and_holds_all_that_is_wanted(
    bus, tmp_path, omitted, omitted_later, changed
):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"

    class Asks(Hook):
        observes = True  # so the state stays the same

        def after_train_iter(self, event):
            event.run.checkpoints.save(one.name, leave_out=omitted)

        def after_train_epoch(self, event):
            if changed is not None:
                model.state_dict()[changed].add_(1)
            event.run.checkpoints.save(two.name, leave_out=omitted_later)

    bus.add(Asks())
    with Run(bus, model=model, optimizer=torch.optim.SGD(model.parameters()), work_dir=tmp_path) as run:
        list(run.train([1]))
    assert one.samefile(two) is (changed is None and not omitted)
    assert ("optimizer" in load(two)) is (not omitted_later or not omitted)
    if changed is not None:
        assert torch.equal(load(two)["state_dict"][changed], load(one)["state_dict"][changed] + 1)


def test_an_interrupt_before_the_writer_has_a_save_leaves_the_run_free_to_save(bus, tmp_path, monkeypatch):
    real = PendingSaves.enter

    def interrupt(pending, job, **options):
        monkeypatch.undo()
        real(pending, job, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingSaves, "enter", interrupt)
    with Run(bus, model=torch.nn.Linear(2, 2), work_dir=tmp_path) as run:
        batches = iter(run.train([1, 2]))
        next(batches)
        run.checkpoints.save("a")
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        run.checkpoints.save("b")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("last_checkpoint", ".lock")] == ["b"]
