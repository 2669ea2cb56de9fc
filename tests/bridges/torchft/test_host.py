"""``Run(replicas=manager)`` in one process, with a real lighthouse and manager."""

import shutil
import threading

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import DataLoader

from trainbus.bridges.torchft import lookout, privates
from trainbus.bridges.torchft.host import KEY
from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError
from trainbus.eventloop.checkpoint import overlap
from trainbus.eventloop.events import AfterLoadCheckpoint, AfterTrainIter, BeforeTrainEpoch, BeforeTrainIter, CheckpointSkipped
from trainbus.hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    DistSamplerSeedHook,
    EarlyStoppingHook,
    EMAHook,
    EmptyCacheHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    PreemptionHook,
    ProgressBar,
    RuntimeInfoHook,
)
from trainbus.hooks.writers import JSONLinesWriter
from trainbus.observe import RunRecordHook

from ...waiting import until
from . import groups

torchft = pytest.importorskip("torchft")
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft's log


WIDE = 8192  # so that the copies of a save are made beside the training


class Job:
    """A training of one replica group, of ``length`` batches in an epoch."""

    def __init__(self, manager, bus=None, *, norm=False, width=8, length=5, **options):
        torch.manual_seed(0)
        self.manager, self.bus = manager, Bus() if bus is None else bus
        self.model = groups.Net(norm=norm, width=width)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = torchft.Optimizer(manager, self.inner)
        self.loader = DataLoader(groups.rows(4 * length), batch_size=4, shuffle=True)
        self.run = Run(self.bus, model=self.model, optimizer=self.optimizer, **{"seed": 1, "replicas": manager} | options)
        self.batches = []
        """The samples of each body, and whether the manager committed it."""

    def train(self, epochs=1, between=lambda body: None, *, fails=()):
        """Train; ``between`` is called before the step of each body, which has an error if its number is in ``fails``."""
        with self.run as run:
            for _ in run.epochs(epochs):
                for numbers, rows, targets in run.train(self.loader):
                    self.optimizer.zero_grad()
                    loss = (self.model(rows) - targets).pow(2).mean()
                    loss.backward()
                    for parameter in self.model.parameters():
                        self.manager.allreduce(parameter.grad).wait()
                    if len(self.batches) in fails:
                        self.manager.report_error(RuntimeError("a collective failed"))
                    between(len(self.batches))
                    self.optimizer.step()
                    run.report(loss=loss)
                    self.batches.append((numbers.tolist(), run.updated))
        return self


def heard(bus, *kinds):
    """Return a list that gets the name, epoch and iteration of each event."""
    events = []
    for kind in kinds:
        bus.on(kind, lambda event: events.append((type(event).__name__, event.progress.epoch, event.progress.iter)))
    return events


def weights(job):
    return torch.cat([parameter.detach().flatten().clone() for parameter in job.model.parameters()])


def test_a_step_that_is_not_committed_leaves_no_trace(manager, tmp_path):
    """Its batch comes again, with the same random numbers; weights, statistics, averages and schedule are as without it."""
    jobs = []
    for fails in ((), (2, 3, 6)):
        bus = Bus()
        events = heard(bus, BeforeTrainIter, AfterTrainIter)
        job = Job(manager(), bus, norm=True, work_dir=tmp_path / str(len(fails)), name="same")
        ema = EMAHook(momentum=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(job.inner, 0.9)
        bus.add(ema, ParamSchedulerHook(schedule, by="iter"), LoggerHook(1, writers=[JSONLinesWriter()]))
        job.train(2, fails=fails)
        job.events, job.ema, job.schedule = events, ema.average, schedule
        jobs.append(job)
    smooth, struck = jobs
    assert [committed for _, committed in struck.batches] == [number not in (2, 3, 6) for number in range(13)]
    assert [numbers for numbers, committed in struck.batches if committed] == [numbers for numbers, _ in smooth.batches]
    assert struck.batches[2][0] == struck.batches[3][0] == struck.batches[4][0]
    assert struck.events == smooth.events
    assert struck.run.progress == smooth.run.progress
    assert struck.manager.current_step() == struck.run.counters.iter == struck.run.counters.update == 10
    for key, value in smooth.model.state_dict().items():
        assert torch.equal(struck.model.state_dict()[key], value), key
    for key, value in smooth.ema.tensors.items():
        assert torch.equal(struck.ema.tensors[key], value), key
    assert struck.schedule.get_last_lr() == smooth.schedule.get_last_lr()
    assert scalars(struck) == scalars(smooth)


def scalars(job):
    """Return the lines of the logger, without times."""
    import json

    lines = (json.loads(line) for line in (job.run.work_dir / "scalars.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_a_body_that_is_left_before_the_step_keeps_its_batch(manager):
    """``break`` before the step: the next loop begins with the same batch."""
    job, seen = Job(manager()), []
    with job.run as run:
        for _ in run.epochs(1):
            batches = run.train(job.loader)
            for numbers, *_ in batches:
                seen.append(numbers.tolist())
                break
            for numbers, rows, _ in batches:
                seen.append(numbers.tolist())
                job.optimizer.zero_grad()
                job.model(rows).sum().backward()
                job.optimizer.step()
    assert seen[0] == seen[1]
    assert len(seen) == 6
    assert run.counters.iter == job.manager.current_step() == 5


def test_the_state_that_is_handed_out_is_of_one_moment(manager):
    """It is asked for on another thread in the middle of a forward pass, which has changed the batch norm already."""
    job, handed, statistics = Job(manager(), norm=True), {}, []
    job.bus.add(ema := EMAHook(momentum=0.1), LoggerHook(1, writers=[]))

    def hand_out():
        handed.update(torch.utils._pytree.tree_map(_copied, job.run.host.replicas.hand_out()))

    def ask(*_):
        if job.run.counters.iter == 3:
            assert job.model.norm.num_batches_tracked.item() == 4
            handed["weights"], handed["average"] = weights(job), ema.average.tensors["last.bias"].clone()
            thread = threading.Thread(target=hand_out)
            thread.start()
            thread.join()

    job.model.norm.register_forward_hook(ask)
    job.bus.on(BeforeTrainIter, lambda event: statistics.append(job.model.norm.running_mean.clone()))
    job.train(1)
    raw = handed["ema_state_dict"]
    assert handed["progress"]["iter"] == handed["progress"]["batches"] == handed["stateful"]["torchft"]["step"] == 3
    assert raw["norm.num_batches_tracked"].item() == 3
    assert torch.equal(raw["norm.running_mean"], statistics[3])
    assert torch.equal(handed["state_dict"]["last.bias"], handed["average"])
    assert torch.equal(torch.cat([raw[name].flatten() for name, _ in job.model.named_parameters()]), handed["weights"])


def state_in(job, body):
    """Train; return the state that the group hands out in a body."""
    kept = {}

    def between(now):
        if now == body:
            kept.update(torch.utils._pytree.tree_map(_copied, job.run.host.replicas.hand_out()))

    job.train(2, between)
    return kept


def _copied(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def test_a_healed_group_goes_on_as_a_resumed_run(manager):
    """Counts, epoch, batch and hooks are those of the state; the outputs of the body belong to other weights."""
    ahead = Job(manager(), Bus(EMAHook()))
    state = state_in(ahead, 7)
    ema, outputs = EMAHook(), {}
    job = Job(manager(), Bus(CheckInvalidLossHook(1), ema))
    events = heard(job.bus, AfterLoadCheckpoint, BeforeTrainEpoch, AfterTrainIter)
    job.bus.on(AfterTrainIter, lambda event: outputs.update({event.progress.iter: (event.run.healed, "loss" in event.outputs)}))
    with capture_logs() as logs:
        job.train(2, lambda body: job.run.host.replicas.heal(state) if body == 1 else None)
    assert events[:6] == [
        ("BeforeTrainEpoch", 0, 0),
        ("AfterTrainIter", 0, 0),
        ("AfterLoadCheckpoint", 1, 7),
        ("BeforeTrainEpoch", 1, 7),
        ("AfterTrainIter", 1, 7),
        ("AfterTrainIter", 1, 8),
    ]
    assert outputs == {0: (False, True), 7: (True, False), 8: (False, True), 9: (False, True)}
    assert [numbers for numbers, _ in job.batches[2:]] == [numbers for numbers, _ in ahead.batches[8:]]
    assert job.run.progress.epoch == 2
    assert job.run.counters.iter == job.run.counters.update == job.manager.current_step() == ema.average.steps == 10
    line = next(line for line in logs if "taken over" in line["event"])
    assert (line["first"], line["last"]) == (1, 7)


@pytest.mark.parametrize("at", [4, 5, 6, 12])
def test_a_group_heals_in_any_pass_of_an_iteration_based_training(manager, at):
    """The epoch is one; the order of the data changes from pass to pass."""

    def train(job, body):
        with job.run as run:
            for _ in run.epochs(max_iters=15):
                for numbers, rows, _ in run.train(job.loader, endless=True):
                    job.optimizer.zero_grad()
                    job.model(rows).sum().backward()
                    body()
                    job.optimizer.step()
                    job.batches.append(numbers.tolist())
        return job

    state = {}
    ahead = Job(manager())
    ask = ahead.run.host.replicas.hand_out
    train(ahead, lambda: ahead.run.counters.iter == at and state.update(torch.utils._pytree.tree_map(_copied, ask())))
    job = Job(manager())
    train(job, lambda: job.run.counters.iter == 1 and job.run.host.replicas.heal(state))
    assert job.batches[2:] == ahead.batches[at + 1 :]
    assert job.run.counters.iter == job.manager.current_step() == 15


def test_a_healed_step_that_is_not_committed_is_repeated(manager):
    """The batch that comes again is the one that belongs to the new weights."""
    ahead = Job(manager())
    state = state_in(ahead, 7)
    job = Job(manager())
    job.train(2, lambda body: job.run.host.replicas.heal(state) if body == 1 else None, fails={1})
    assert [numbers for numbers, _ in job.batches[2:]] == [numbers for numbers, _ in ahead.batches[7:]]
    assert torch.equal(weights(job), weights(ahead))


def test_a_group_that_heals_before_its_forward_pass_says_what_it_trains(manager):
    """``use_async_quorum=False``: the body has read the batch of another step already."""
    state = state_in(Job(manager(use_async_quorum=False)), 7)
    job = Job(manager(use_async_quorum=False))
    start, calls = job.manager.start_quorum, []

    def start_quorum(*args, **options):
        start(*args, **options)
        calls.append(job.run.counters.iter)
        if len(calls) == 2:
            job.run.host.replicas.heal(state)

    job.manager.start_quorum = start_quorum
    with capture_logs() as logs:
        job.train(2)
    assert calls == [0, 1, 8, 9]
    assert job.run.counters.iter == job.manager.current_step() == 10
    assert [line["iter"] for line in logs if line.get("id") == "torchft-batch-of-another-iteration"] == [1]


@pytest.mark.parametrize("own", [False, True], ids=["the run's functions", "own functions, too"])
def test_copies_beside_the_training_end_before_a_healing(manager, tmp_path, monkeypatch, own):
    """A save whose copies are whole before weights change is kept; one that may be mixed is dropped, and that is said."""
    state = state_in(Job(manager(), width=WIDE), 7)
    saving = CheckpointHook(2, by_epoch=False, save_last=False, staging="overlap")
    job = Job(manager(), Bus(saving), width=WIDE, work_dir=tmp_path / "run")
    if own:
        functions = job.manager._load_state_dict_fns
        functions["own"] = lambda state: None
        functions[KEY] = functions.pop(KEY)
    hold, skipped = threading.Event(), []
    monkeypatch.setattr("trainbus.eventloop.checkpoint.overlap._copy_lots", _held(hold))
    job.bus.on(CheckpointSkipped, lambda event: skipped.append((event.path, "healing" in event.reason)))

    def between(body):
        if body == 1:  # the copies of the save after it
            hold.clear()
        elif body == 2:
            assert job.run.host.saver.overlap.busy
            if own:
                with torch.no_grad():
                    job.model.first.weight.add_(1)
            threading.Timer(0.2, hold.set).start()
            job.run.host.replicas.heal(state)

    hold.set()
    job.train(2, between)
    first = tmp_path / "run" / "iter_2.safetensors"
    assert skipped == ([(str(first), True)] if own else [])
    assert first.exists() is not own
    assert (tmp_path / "run" / "iter_8.safetensors").exists()


def _held(hold):
    copy = overlap._copy_lots

    def late(*args):
        hold.wait(20)
        copy(*args)

    return late


def test_the_hooks_of_trainbus_go_on_in_a_healed_group(manager, tmp_path):
    """All that a run may have: none of them minds that the run is at another place, and the record tells one training."""
    state = state_in(Job(manager()), 7)
    hooks = [RuntimeInfoHook(), IterTimerHook(), DistSamplerSeedHook(), LoggerHook(1), RunRecordHook(), ProgressBar()]
    more = [CheckpointHook(1), EMAHook(), EarlyStoppingHook("loss"), PreemptionHook()]
    job = Job(manager(), Bus(*hooks, *more, CheckInvalidLossHook(1), EmptyCacheHook()), work_dir=tmp_path / "run")
    with job.run as run:
        for _ in run.epochs(3):
            for numbers, rows, targets in run.train(job.loader):
                job.optimizer.zero_grad()
                loss = (job.model(rows) - targets).pow(2).mean()
                loss.backward()
                if run.counters.iter == 1:
                    run.host.replicas.heal(state)
                job.optimizer.step()
                run.report(loss=loss)
                job.batches.append(numbers)
            for _, rows, targets in run.validate(job.loader):
                run.report(loss=(job.model(rows) - targets).pow(2).mean())
    assert run.progress.epoch == 3
    assert run.counters.iter == job.manager.current_step() == 15
    assert len(job.batches) == 2 + 7
    assert run.counters.validations == 2
    steps = [line["step"] for line in scalars(job) if "train/loss" in line]
    assert steps == [1, *range(9, 16)]
    assert {path.name for path in (tmp_path / "run").glob("*.safetensors")} >= {"epoch_2.safetensors", "epoch_3.safetensors"}
    assert (run.work_dir / "run.json").exists()


def test_the_group_that_takes_over_keeps_and_removes_the_files_of_the_other(manager, tmp_path):
    """It makes up for the file that the other one was writing."""
    other = Job(manager(), Bus(CheckpointHook(1, by_epoch=False)), work_dir=tmp_path / "other").train(1)
    job = Job(manager(), Bus(CheckpointHook(1, by_epoch=False, max_keep_ckpts=2)), work_dir=tmp_path / "run")
    rank = job.manager.participating_rank
    job.manager.participating_rank = lambda: rank() if job.run.counters.iter > 2 else 1

    def between(body):
        if body == 2:  # the other group has saved twice, and dies in the third save
            assert not [*(tmp_path / "run").glob("*.safetensors")]
            for number in (1, 2):
                shutil.copy(tmp_path / "other" / f"iter_{number}.safetensors", tmp_path / "run")

    with capture_logs() as logs:
        job.train(1, between)
    files = {path.name for path in (tmp_path / "run").glob("*.safetensors")}
    assert files == {"iter_4.safetensors", "iter_5.safetensors"}
    told = [line["names"] for line in logs if line.get("id") == "torchft-files-missing"]
    assert told == [[str(tmp_path / "run" / "iter_3.safetensors")]]
    assert torch.equal(weights(job), weights(other))


class Other:
    pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": None}, "seed="),
        ({"replicas": Other()}, "Other"),
        ({"accelerator": object()}, "accelerator="),
        ({"host": object()}, "host"),
    ],
)
def test_what_does_not_go_with_replicas_is_an_error(manager, options, named):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=named):
        Run(model=model, optimizer=optimizer, **{"seed": 1, "replicas": manager()} | options)


def test_a_wrapper_that_fails_with_other_groups_is_told(manager):
    """The DistributedDataParallel of torchft 0.2.0."""
    one = manager()
    wrapped = torchft.DistributedDataParallel(one, groups.Net())
    optimizer = torchft.Optimizer(one, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with capture_logs() as logs, Run(model=wrapped, optimizer=optimizer, seed=0, replicas=one):
        pass
    told = [line["models"] for line in logs if line.get("id") == "torchft-ddp-ends-group"]
    assert told == ([] if hasattr(torchft.ddp, "_completed") else ["model"])


def test_a_manager_without_a_name_needs_one_for_a_work_dir(manager, tmp_path, monkeypatch):
    for name in (None, "..", "a/b"):
        with pytest.raises(ConfigurationError, match="replica_id"):
            Job(manager(name), work_dir=tmp_path)
    monkeypatch.setenv("REPLICA_GROUP_ID", "7")
    assert Job(manager(None), work_dir=tmp_path).run.work_dir == tmp_path / "7"


def test_a_manager_that_has_trained_is_refused(manager):
    job = Job(manager()).train(1)
    with pytest.raises(ConfigurationError, match="step 5"):
        Job(job.manager).train(1)


def test_a_group_of_several_processes_needs_a_process_group(manager):
    with pytest.raises(ConfigurationError, match="init_process_group"):
        Job(manager(world_size=2)).train(1)


@pytest.mark.parametrize("misuse", ["no step", "zero_grad twice", "zero_grad outside"])
def test_a_loop_that_the_manager_cannot_lead_is_an_error(manager, misuse):
    """Each iteration is one step of the manager."""
    job = Job(manager())
    with pytest.raises(TrainingError, match="zero_grad"), job.run as run:
        if misuse == "zero_grad outside":
            job.optimizer.zero_grad()
        for _ in run.epochs(1):
            for _, rows, _ in run.train(job.loader):
                if misuse == "zero_grad twice":
                    job.optimizer.zero_grad()
                    job.model(rows).sum().backward()
                    job.optimizer.step()
                    job.optimizer.zero_grad()


def test_a_state_that_cannot_be_handed_out_ends_the_run(manager):
    """The manager only logs such an error, and would repeat the step for ever."""
    job = Job(manager())

    class Broken:
        def state_dict(self):
            raise ValueError("no state")

        def load_state_dict(self, state):
            raise AssertionError

    job.run.stateful["broken"] = Broken()

    def between(body):
        with pytest.raises(ValueError, match="no state"):
            job.run.host.replicas.hand_out()

    with pytest.raises(ValueError, match="no state"):
        job.train(1, between)


def test_the_manager_is_as_before_when_the_run_has_ended(manager):
    job = Job(manager())
    before = dict(vars(job.manager))
    job.train(1)
    assert {"start_quorum", "should_commit"}.isdisjoint(vars(job.manager))
    assert vars(job.manager).keys() == before.keys()


def test_a_checkpoint_continues_with_and_without_replicas(manager, tmp_path):
    """The step of the manager is in the file; a file without it gives the manager its iteration."""
    whole = Job(manager(), Bus(CheckpointHook(1)), work_dir=tmp_path / "whole").train(3)
    Job(manager(), Bus(CheckpointHook(1)), work_dir=tmp_path / "parts").train(1)
    rest = Job(manager(), Bus(CheckpointHook(1)), work_dir=tmp_path / "parts").train(3)
    assert rest.run.checkpoints.resumed_from == tmp_path / "parts" / "epoch_1.safetensors"
    assert torch.equal(weights(rest), weights(whole))
    assert rest.manager.current_step() == rest.manager.batches_committed() == 15
    plain = Job(manager(), Bus(CheckpointHook(1, by_epoch=False)), replicas=None, work_dir=tmp_path / "plain")
    with plain.run as run:
        for _ in run.epochs(1):
            for _, rows, _ in run.train(plain.loader):
                plain.inner.zero_grad()
                plain.model(rows).sum().backward()
                plain.inner.step()
    last = tmp_path / "plain" / "iter_5.safetensors"
    assert Job(manager(), resume=last).train(2).manager.current_step() == 10


@pytest.mark.parametrize("path", privates.NAMES)
def test_a_manager_without_a_name_that_is_needed_is_refused(manager, path):
    """The error names the library and the name."""
    one = manager()
    name = path.rpartition(".")[2]
    value = vars(one).pop(name)
    try:
        with pytest.raises(ConfigurationError, match=rf"torchft .*{name}"):
            Job(one)
    finally:
        setattr(one, name, value)


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_what_does_not_take_a_step_in_each_iteration_is_an_error_that_says_so(manager, kind):
    local_sgd = pytest.importorskip("torchft.local_sgd")
    managed, model = manager(use_async_quorum=False), groups.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "LocalSGD":
        syncing = local_sgd.LocalSGD(managed, model, inner, sync_every=2)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        syncing = local_sgd.DiLoCo(managed, [model], inner, outer, sync_every=2)
    with pytest.raises(TrainingError, match=r"LocalSGD and DiLoCo .* without replicas="), syncing:
        with Run(model=model, optimizer=inner, replicas=managed, seed=1) as run:
            for _ in run.epochs(1):
                for _, rows, targets in run.train(DataLoader(groups.rows(16), batch_size=4)):
                    inner.zero_grad()
                    (model(rows) - targets).pow(2).mean().backward()
                    inner.step()


def test_a_lighthouse_that_does_not_answer_is_said(manager, monkeypatch, change):
    change(lookout.LOOK, 0.02)
    change(lookout.PATIENCE, 0.1)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://somewhere:1")
    managed = manager()
    job = Job(managed)

    def hold(body):
        if body == 2:  # the lighthouse is gone when the next step asks it
            monkeypatch.setattr(privates, "waits_for_quorum", lambda manager: True)
            until(lambda: any(line.get("id") == "torchft-no-quorum" for line in logs))
            monkeypatch.setattr(privates, "waits_for_quorum", lambda manager: False)
            until(lambda: any("answers again" in line["event"] for line in logs))

    with capture_logs() as logs:
        job.train(1, hold)
    told = [line for line in logs if line.get("id") == "torchft-no-quorum"]
    assert [line["lighthouse"] for line in told] == ["http://somewhere:1"]
    assert not any(thread.name.startswith("trainbus looks") for thread in threading.enumerate())
