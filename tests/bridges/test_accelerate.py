"""``Run(bus, accelerator=...)`` around a loop with Accelerate, against the real library."""

import itertools
from types import SimpleNamespace

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration

from eventloop import Bus, ConfigurationError, Run, TrainingError, attach
from eventloop.errors import CheckpointError
from hooks import EMAHook, ParamSchedulerHook

from ..waiting import until
from .jobs import Counting, assert_same, network, weights_of


@pytest.fixture(autouse=True)
def reset():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Job:
    """A loop as Accelerate's users write it."""

    def __init__(self, steps=1, **options):
        model = network()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 3), batch_size=4, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(model, optimizer, data, schedule)
        torch.manual_seed(1)

    def learn(self, batch):
        inputs, labels = batch
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss

    def run(self, bus, **options):
        return Run(bus, model=self.model, optimizer=self.optimizer, accelerator=self.accelerator, **options)

    def train(self, run, epochs, then=lambda: None):
        for _ in run.epochs(epochs):
            for batch in run.train(self.data):
                run.report(loss=self.learn(batch))
                then()

    def weights(self):
        return weights_of(self.model)


@pytest.mark.filterwarnings("ignore:resuming reads and drops")  # the loaders of Accelerate cannot skip
def test_a_checkpoint_of_accelerate_is_loaded_in_the_run_too(tmp_path):
    def make():
        hook, ema = Counting(), EMAHook(momentum=0.1)
        return Job(), Bus(hook, ema), hook, ema

    whole, bus, hook, ema = make()
    with whole.run(bus) as run:
        whole.train(run, 3)
    counters = run.counters

    cut, bus, *_ = make()
    with cut.run(bus) as run:

        def save():
            if run.progress.iter + 1 == 11:
                cut.accelerator.save_state(tmp_path / "state")
                run.stop()

        cut.train(run, 3, save)

    rest, bus, counted, average = make()
    run = rest.run(bus)
    with run:
        rest.accelerator.load_state(tmp_path / "state")
        rest.train(run, 3)
    assert counted.seen == hook.seen
    assert len(hook.iters) == 24
    assert run.counters == counters
    assert_same(rest.weights(), whole.weights())
    assert_same(average.average.tensors, ema.average.tensors)


@pytest.mark.parametrize("hooks", [[], [EMAHook]])
def test_what_accelerate_saves_itself_is_not_saved_again(tmp_path, hooks):
    job = Job()
    with job.run(Bus(*(hook() for hook in hooks))) as run:
        job.train(run, 1)
        job.accelerator.save_state(tmp_path)
    entry = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert "optimizer" not in entry
    assert ("state_dict" in entry) is bool(hooks)


def test_a_state_is_saved_and_loaded_only_where_it_makes_sense(tmp_path):
    job = Job()
    with job.run(Bus()) as run:
        job.train(run, 1)
        with pytest.raises(TrainingError):
            job.accelerator.save_state(tmp_path)
            job.accelerator.load_state(tmp_path)
    with pytest.raises(TrainingError, match=r"accelerator\.save_state\(\)"):
        job.accelerator.save_state(tmp_path / "late")
    torch.save({"other": 1}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"load_state\(\)"):
        job.accelerator.load_state(tmp_path)


def test_a_second_run_takes_the_place_of_the_first(tmp_path):
    job = Job()
    with job.run(Bus()) as run:
        job.train(run, 1)
    with job.run(Bus()) as run:
        job.train(run, 1)
        job.accelerator.save_state(tmp_path)
    assert len(list(tmp_path.glob("custom_checkpoint_*"))) == 1


def test_another_object_is_refused():
    with pytest.raises(ConfigurationError, match=r"accelerate\.Accelerator"):
        Run(Bus(), model=nn.Linear(1, 1), accelerator=object())


# --------------------------------------------------------------------- folders written beside the training


def named(directory, limit=None):
    """A job whose accelerator names its folders itself."""
    project = ProjectConfiguration(project_dir=str(directory), automatic_checkpoint_naming=True, total_limit=limit)
    job = Job(project_config=project)
    attach(job.accelerator, checkpoints=True)
    return job


def learn(job, steps=1):
    for batch in itertools.islice(job.data, steps):
        job.learn(batch)


def folders(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_folder_has_the_files_of_accelerate_which_loads_it_without_trainbus(tmp_path):
    plain, job = Job(), Job()
    plain.accelerator.save_state(tmp_path / "plain")
    with attach(job.accelerator, checkpoints=True):
        returned = job.accelerator.save_state(tmp_path / "ours")
        learn(job)
    assert returned == tmp_path / "ours"
    assert folders(tmp_path / "ours") == sorted([*folders(tmp_path / "plain"), "trainbus-digests.json"])
    assert folders(tmp_path) == ["ours", "plain"]
    fresh = Job()
    with torch.no_grad():
        next(fresh.model.parameters()).zero_()
    fresh.accelerator.load_state(tmp_path / "ours")
    assert_same(fresh.weights(), plain.weights())
    assert fresh.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]


def test_folders_beyond_the_limit_go_and_others_stay(tmp_path):
    job, directory = named(tmp_path, limit=2), tmp_path / "checkpoints"
    (directory / "notes_1").mkdir(parents=True)
    for _ in range(4):
        job.accelerator.save_state()
        learn(job)
    job.accelerator.end_training()
    assert folders(directory) == ["checkpoint_2", "checkpoint_3", "notes_1"]
    assert folders(tmp_path) == ["checkpoints"]


def test_a_save_that_failed_is_told_and_the_folders_before_it_stay(tmp_path, disk):
    disk.go.set()
    job, directory = named(tmp_path, limit=1), tmp_path / "checkpoints"
    job.accelerator.save_state()
    until((directory / "checkpoint_0").exists)
    disk.error = OSError("broken disk")
    job.accelerator.save_state()
    with pytest.raises(CheckpointError, match="broken disk"):
        job.accelerator.save_state()
    disk.error = None
    assert folders(directory) == ["checkpoint_0"]
    job.accelerator.load_state()  # the newest that is there
    job.accelerator.save_state()
    job.accelerator.end_training()
    assert len(folders(directory)) == 1
    assert folders(tmp_path) == ["checkpoints"]


def test_a_folder_is_replaced_but_no_other_files(tmp_path):
    job = Job()
    attach(job.accelerator, checkpoints=True)
    for _ in range(2):
        job.accelerator.save_state(tmp_path / "state")
        learn(job)
    job.accelerator.load_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        job.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert folders(tmp_path) == ["state"]


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    job = Job()
    attach(job.accelerator, checkpoints=True)
    assert job.accelerator.save_state("~/state") == tmp_path / "home" / "state"
    job.accelerator.load_state("~/state")
    job.accelerator.end_training()
    assert not (tmp_path / "~").exists()


def test_a_damaged_folder_is_not_loaded(tmp_path):
    job = Job()
    attach(job.accelerator, checkpoints=True)
    job.accelerator.save_state(tmp_path / "state")
    job.accelerator.load_state(tmp_path / "state")
    with (tmp_path / "state" / "optimizer.bin").open("r+b") as file:
        file.seek(-20, 2)
        file.write(b"?")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        job.accelerator.load_state(tmp_path / "state")


def test_the_newest_named_folder_is_checked_and_missing_files_are_told(tmp_path):
    job = named(tmp_path)
    for _ in range(11):
        newest = job.accelerator.save_state()
    job.accelerator.load_state()
    (newest / "random_states_0.pkl").unlink()
    with structlog.testing.capture_logs() as logs:
        job.accelerator.load_state()
    assert [(one["path"], one["files"]) for one in logs if "missing" in one["event"]] == [
        (str(newest), ["random_states_0.pkl"])
    ]
    (newest / "optimizer.bin").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"checkpoint_10.*optimizer\.bin"):
        job.accelerator.load_state()


def test_what_cannot_be_written_beside_the_training_is_refused():
    job = Job()
    with pytest.raises(ConfigurationError, match="around Run"):
        attach(job.accelerator)
    job.accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ConfigurationError, match="FSDP"):
        attach(job.accelerator, checkpoints=True)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_schedule_steps_by_the_hook_prepared_or_not(prepared):
    job = Job()
    schedule = job.schedule if prepared else job.schedule.scheduler
    job.schedule = SimpleNamespace(step=lambda: None)
    with job.run(Bus(ParamSchedulerHook(schedule, by="iter"))) as run:
        job.train(run, 1)
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
