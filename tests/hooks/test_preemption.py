import functools
import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import anyio
import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Run, RunPreempted, TrainingError
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook, PreemptionHook, SignalDoor

from ..failing import fails
from ..scripts import Script
from ..waiting import until
from .preempted import make_loop

ROOT = Path(__file__).parent.parent.parent


class Child:
    """The job in a process of its own: says when it is where it was told to wait, and goes on when told to."""

    def __init__(self, folder, work_dir, *, signals=(signal.SIGTERM,), **options):
        options |= {"work_dir": None if work_dir is None else str(work_dir), "signals": [int(one) for one in signals]}
        stdin = folder / "in"
        for path in (stdin, folder / "job.out"):
            os.mkfifo(path)
        self._script = Script(
            f"from tests.hooks.preempted import main; main(**{options})", folder, name="job", stdin=stdin, cwd=ROOT
        )
        self._in = open(stdin, "w")  # noqa: SIM115, PTH123
        self._out = open(self._script.out)  # noqa: SIM115, PTH123
        self._ended = False

    def wait_until_it_is_there(self):
        assert self._out.readline() == "here\n", self._log

    def says(self):
        return self._out.readline().rstrip()

    def send(self, number, *, group=False):
        (os.killpg if group else os.kill)(self._script.pid, number)

    def gets(self, number, **options):
        """Send a signal when it is there, and let it go on."""
        self.wait_until_it_is_there()
        self.send(number, **options)
        self._in.write("go on\n")
        self._in.flush()

    def end(self):
        """Let it end; return its exit status, the lines it said, and its log."""
        self._in.close()
        said = self._out.read().splitlines()
        self._script.process.join()
        self._ended = True
        return self._script.process.exitcode, said, self._log

    @property
    def _log(self):
        return self._script.err.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if not self._ended:
            os.killpg(self._script.pid, signal.SIGKILL)  # with the workers of its loaders
        self._script.kill()
        self._in.close()
        self._out.close()


@pytest.fixture
def start(tmp_path_factory):
    return functools.partial(Child, tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights of the job, trained without a stop."""
    loop = make_loop(None)
    loop.run()
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


def resumed(work_dir):
    """Weights of the job after it went on from what is in ``work_dir``."""
    loop = make_loop(work_dir, PreemptionHook())
    loop.run(resume="auto")
    assert loop.counters.iter == 20
    return dict(loop.model.state_dict())


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "iteration", "done"),
    [
        ("before_forward", 8, 8),  # the second epoch's third iteration: finished
        ("after_train_iter", 10, 10),  # an epoch's last one
        ("before_val_iter", 3, 5),  # the first validation's third batch
    ],
)
def test_sigterm_saves_and_ends_in_order_and_a_resumed_run_is_the_same(start, tmp_path, uninterrupted, at, iteration, done):
    with start(tmp_path, at=at, iteration=iteration) as child:
        child.gets(signal.SIGTERM)
        status, said, log = child.end()
    assert (status, said) == (75, ["signal SIGTERM", f"{done} iterations", "the handler from before"]), log
    assert "a signal ended the run" in log
    assert (tmp_path / "last_checkpoint").read_text() == f"iter_{done}.safetensors"
    assert load(tmp_path / f"iter_{done}.safetensors")["progress"]["iter"] == done
    assert all(torch.equal(value, uninterrupted[name]) for name, value in resumed(tmp_path).items())


def test_a_signal_repeated_within_a_moment_is_one_request(start, tmp_path):
    """From a scheduler that signals each process of a job, and from ``torchrun``, which hands on its own."""
    with start(tmp_path, times=2) as child:
        child.gets(signal.SIGTERM)
        child.gets(signal.SIGTERM)
        status, said, log = child.end()
    assert (status, said[:2]) == (75, ["signal SIGTERM", "8 iterations"]), log
    assert load(tmp_path / "iter_8.safetensors")["progress"]["iter"] == 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "options", "status", "end"),
    [
        (signal.SIGTERM, {}, -signal.SIGTERM, ""),
        (signal.SIGINT, {"at": "before_val_iter", "iteration": 1}, 1, "KeyboardInterrupt\n"),
    ],
)
def test_a_second_signal_has_its_default_effect(start, tmp_path, number, options, status, end):
    with start(tmp_path, signals=[number], times=2, moment=0, **options) as child:
        child.gets(number)
        child.wait_until_it_is_there()
        child.send(number)
        ended, said, log = child.end()
    assert (ended, said) == (status, [])
    assert log.endswith(end)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("late", ["except", "atexit"])
def test_a_signal_after_a_preempted_run_does_not_change_the_exit_status(start, tmp_path, late):
    """All processes of a run stop when one gets a signal, and a launcher may signal the others while they are ending."""
    with start(tmp_path, late=late) as child:
        child.gets(signal.SIGTERM)
        said = [child.says() for _ in range(3)]
        child.wait_until_it_is_there()
        child.send(signal.SIGTERM)
        status, _, log = child.end()
    assert (status, said[0]) == (75, "signal SIGTERM"), log


WORKERS = {"num_workers": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, {"workers": WORKERS}),
        (signal.SIGTERM, {"workers": WORKERS}),
        (signal.SIGTERM, {"workers": WORKERS, "at": "before_val_iter", "iteration": 1}),
        (signal.SIGTERM, {"workers": {**WORKERS, "persistent_workers": True}, "early": True}),
        (signal.SIGTERM, {"workers": {"num_workers": 1, "multiprocessing_context": "spawn"}, "iteration": 2}),
    ],
    ids=["SIGINT", "SIGTERM", "validation", "persistent", "spawn"],
)
def test_the_workers_of_loaders_outlive_a_signal_to_the_process_group_and_the_run_saves(start, tmp_path, number, options):
    """As Ctrl-C at a terminal does, or a scheduler, or torchrun."""
    with start(tmp_path, signals=[number], **options) as child:
        child.gets(number, group=True)
        status, said, log = child.end()
    done = {"before_val_iter": 5}.get(options.get("at"), options.get("iteration", 8))
    assert (status, said[:2]) == (75, [f"signal {number.name}", f"{done} iterations"]), log
    assert load(tmp_path / f"iter_{done}.safetensors")["progress"]["iter"] == done


@pytest.mark.long
@pytest.mark.parametrize(("at", "done", "held"), [("before_forward", 1, 2), ("before_val_iter", 5, 4)])
def test_a_worker_that_is_still_starting_outlives_the_signal_too(start, tmp_path, at, done, held):
    """The second worker has not come to its ``worker_init_fn`` when the signal comes."""
    hold = tmp_path / "go on"
    with start(tmp_path, at=at, iteration=1, workers=WORKERS, hold=str(hold), held=held) as child:
        child.gets(signal.SIGTERM, group=True)
        hold.touch()
        status, said, log = child.end()
    assert (status, said[:2]) == (75, ["signal SIGTERM", f"{done} iterations"]), log


def test_without_a_work_dir_a_signal_ends_the_run_and_logs_that_nothing_is_saved(start):
    with start(None, signals=[signal.SIGUSR1, signal.SIGTERM]) as child:
        child.gets(signal.SIGUSR1)
        status, said, log = child.end()
    # The handler from before is back afterwards, and was not called for the first one.
    assert (status, said) == (75, ["signal SIGUSR1", "8 iterations", "the handler from before"]), log
    assert "no work_dir" in log


def test_without_the_hook_sigterm_ends_the_process_as_ever(start, tmp_path):
    with start(tmp_path, signals=[signal.SIGUSR1]) as child:
        child.wait_until_it_is_there()
        child.send(signal.SIGTERM)
        status, said, _ = child.end()
    assert (status, said) == (-signal.SIGTERM, [])


# ------------------------------------------------------------------------------------------------- in this process


@pytest.fixture
def mine():
    """A handler of SIGUSR1 and SIGUSR2 that notes what it hears."""
    heard = []

    def handler(number, frame):
        heard.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield heard, handler
    for number, previous in before.items():
        signal.signal(number, previous)


def test_nothing_is_installed_without_the_hook(job):
    everything = {number: signal.getsignal(number) for number in signal.valid_signals()}
    seen = []
    loop = job.loop()
    loop.bus.on("after_train_iter", lambda e: seen.append({n: signal.getsignal(n) for n in signal.valid_signals()}), once=1)
    loop.run()
    assert seen == [everything]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mount_point", ["before_run", "after_train_iter", "after_run"])
def test_the_previous_handlers_are_restored_after_any_end_of_the_run(job, mine, mount_point, error):
    loop = job.loop(PreemptionHook([signal.SIGUSR1, signal.SIGUSR2]))
    loop.bus.on(mount_point, fails(error("out")))
    with pytest.raises(error):
        loop.run()
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is mine[1]


def test_the_hook_serves_one_run_after_the_other(job, mine, tmp_path):
    hook = PreemptionHook([signal.SIGUSR1], exit_code=9)
    loop = job.loop(hook, work_dir=tmp_path, test_data=job.batches())
    loop.bus.on("after_train_iter", lambda e: signal.raise_signal(signal.SIGUSR1), once=2)
    with pytest.raises(RunPreempted) as preempted:
        loop.run()
    assert preempted.value.code == 9
    assert (loop.counters.iter, hook.received) == (2, signal.SIGUSR1)
    loop.run(resume="auto")
    assert (loop.counters.iter, hook.received) == (8, None)
    assert mine[0] == []


@pytest.mark.parametrize("hooks", [(), (CheckpointHook(interval=-1),)], ids=["alone", "beside a hook that keeps all"])
def test_several_signals_leave_one_file_unless_a_hook_keeps_them(job, mine, tmp_path, hooks):
    def train():
        loop = job.loop(PreemptionHook([signal.SIGUSR1]), *hooks, work_dir=tmp_path, max_epochs=3)
        loop.bus.on("after_train_iter", lambda e: e.progress.iter == 1 and e.run.checkpoints.save())
        loop.bus.on("after_train_iter", lambda e: e.progress.iter in (4, 6, 8) and signal.raise_signal(signal.SIGUSR1))
        loop.run(resume="auto")

    for _ in range(3):
        with pytest.raises(RunPreempted):
            train()
    saved = (5, 7, 9) if hooks else (9,)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"iter_{at}.safetensors" for at in (2, *saved)}
    assert load(tmp_path / "iter_9.safetensors")["preempted_by"] == "SIGUSR1"
    train()  # goes on from the last one, which stays until another signal


def test_a_run_of_ones_own_exits_too_unless_it_has_stopped_already(mine):
    model = torch.nn.Linear(1, 1)

    def train(*, stops_before):
        with Run(Bus(PreemptionHook([signal.SIGUSR1])), model=model) as run:
            for _ in (batch for _ in run.epochs(1) for batch in run.train([torch.ones(1)] * 3)):
                if stops_before:
                    run.stop("converged")
                signal.raise_signal(signal.SIGUSR1)
                break

    with pytest.raises(RunPreempted) as preempted:
        train(stops_before=False)
    assert preempted.value.code == 75
    train(stops_before=True)


def test_a_signal_in_the_last_validation_exits_too(job, mine):
    loop = job.loop(PreemptionHook([signal.SIGUSR1]), max_epochs=1, sanity=0, val_data=job.batches())
    loop.bus.on("before_val_iter", lambda event: signal.raise_signal(signal.SIGUSR1), once=2)
    with pytest.raises(RunPreempted):
        loop.run()


def test_a_signal_during_a_test_saves_nothing(job, mine, tmp_path):
    loop = job.loop(PreemptionHook([signal.SIGUSR1], exit_code=None), work_dir=tmp_path, test_data=job.batches())
    seen = []
    loop.bus.on("before_test_iter", lambda e: (seen.append(e.batch_idx), signal.raise_signal(signal.SIGUSR1)), once=1)
    loop.test()
    assert seen == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_goes_to_the_handler_from_before(job, mine, tmp_path):
    loop = job.loop(PreemptionHook([signal.SIGUSR1, signal.SIGUSR2], exit_code=None), work_dir=tmp_path)

    @loop.bus.on("after_train_iter", once=2)
    def twice(event):
        signal.raise_signal(signal.SIGUSR1)
        assert mine[0] == []
        signal.raise_signal(signal.SIGUSR2)
        assert mine[0] == [signal.SIGUSR2]

    loop.run()
    assert loop.counters.iter == 2


def test_a_process_that_is_forked_during_the_run_can_be_terminated_as_before_it(job):
    loop = job.loop(PreemptionHook())
    codes = []

    @loop.bus.on("after_train_iter", once=1)
    def fork(event):
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=lambda: (there.send(1), signal.pause()))
        child.start()
        here.recv()
        child.terminate()
        child.join(20)
        codes.append(child.exitcode)
        child.kill()

    loop.run()
    assert codes == [-signal.SIGTERM]
    assert loop.counters.iter == 8


WAITING = ("waiting for checkpoints",)


def test_a_signal_while_the_last_checkpoint_is_written_does_not_cost_it(job, mine, monkeypatch, tmp_path):
    waited, over = itertools.count(1), threading.Event()
    loop = job.loop(CheckpointHook(interval=-1), work_dir=tmp_path)
    span = loop.bus.span

    def waits(*names):
        if names == WAITING and next(waited) == 2:  # first the save waits for an earlier one, of which there is none
            over.set()
        return span(*names)

    monkeypatch.setattr(loop.bus, "span", waits)
    loop.bus.add(PreemptionHook([signal.SIGUSR1]))

    @loop.bus.on("checkpoint_committed")
    def slow_disk(event):  # on the writing thread, when the run has done all but wait for it
        assert over.wait(30)
        os.kill(os.getpid(), signal.SIGUSR1)

    loop.run()
    assert mine[0] == []
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["epoch_2.safetensors"]
    assert load(tmp_path / "epoch_2.safetensors")["progress"]["iter"] == 8


def test_a_signal_can_arrive_anywhere(job, tmp_path):
    """A timer strikes hundreds of times, in whatever the training thread is doing; nothing breaks or hangs."""
    strikes = []  # for each: whether the loop took it
    loop = job.loop(CheckpointHook(interval=5, by_epoch=False), work_dir=tmp_path, max_iters=60)

    def strike(number, frame):
        try:
            loop.save()
            if len(strikes) > 200:
                loop.stop("enough")
        except TrainingError as error:  # the first may come before run() has begun its call, the last when that is over
            assert "is not running" in str(error)
            strikes.append(False)
        else:
            strikes.append(True)

    @loop.bus.on("after_train_iter", every=20)
    def work_until_the_next_strike(event):  # on a fast machine the whole training is shorter than a tick of the clock
        seen = len(strikes)
        while len(strikes) == seen:
            pass

    before = signal.signal(signal.SIGVTALRM, strike)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        loop.run()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert len(strikes) >= 3
    assert [taken for taken, _ in itertools.groupby(strikes)].count(True) == 1, "a strike amid the run was refused"
    assert load(tmp_path / f"iter_{loop.counters.iter}.safetensors")["progress"]["iter"] == loop.counters.iter


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_door_passes_signals_to_runs_on_other_threads(job, mine, tmp_path, backend):
    hook = PreemptionHook(["SIGUSR1"])
    loop = job.loop(hook, work_dir=tmp_path)

    @loop.bus.on("after_train_iter", once=2)
    def strike(event):
        os.kill(os.getpid(), signal.SIGUSR2)  # which no hook takes
        until(lambda: mine[0])
        mine[0].clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: hook.received is not None)

    with SignalDoor(["SIGUSR1", "SIGUSR2"]) as door:
        anyio.run(loop.arun, backend=backend)
        assert (loop.counters.iter, hook.received, mine[0]) == (2, signal.SIGUSR1, [])
        assert load(tmp_path / "iter_2.safetensors")["progress"]["iter"] == 2
        signal.raise_signal(signal.SIGUSR1)  # no run is open: as without the door, which stays open
        assert mine[0] == [signal.SIGUSR1]
        assert not door.deliver(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is mine[1]


# ------------------------------------------------------------------------------------------------------------ misuse


def test_a_run_on_another_thread_without_a_door_for_its_signals_is_an_error(job):
    loop = job.loop(PreemptionHook(["SIGINT", "SIGTERM"]))
    for door in (nullcontext(), SignalDoor(["SIGINT"])):
        with door, pytest.raises(ConfigurationError, match=r"SignalDoor\(\('SIGINT', 'SIGTERM',\)\)"):
            anyio.run(loop.arun)


def test_a_process_has_one_door_on_its_main_thread():
    with SignalDoor(["SIGINT"]), pytest.raises(ConfigurationError, match="one"), SignalDoor(["SIGTERM"]):
        pass
    with ThreadPoolExecutor() as threads, pytest.raises(ConfigurationError, match="main thread"):
        threads.submit(SignalDoor().__enter__).result()
    assert SignalDoor.current is None
