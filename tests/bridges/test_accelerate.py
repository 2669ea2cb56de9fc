"""``Run(bus, accelerator=...)`` around a loop with Accelerate, against the real library."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from eventloop import Bus, ConfigurationError, Run, TrainingError
from eventloop.errors import CheckpointError
from hooks import EMAHook

from .jobs import Counting, assert_same, network, weights_of


@pytest.fixture(autouse=True)
def reset():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Job:
    """A loop as Accelerate's users write it."""

    def __init__(self, steps=1):
        model = network()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
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


def test_a_bus_changes_no_bit_of_the_weights():
    plain = Job(steps=2)
    for _ in range(25):
        for batch in plain.data:
            plain.learn(batch)
    job, bus = Job(steps=2), Bus()
    bus.add(EMAHook())
    with job.run(bus) as run:
        job.train(run, 25)
    assert (run.counters.iter, run.counters.update) == (200, 100)
    assert_same(job.weights(), plain.weights())


def test_stops_and_saves_wait_for_the_step_of_the_window(tmp_path):
    job, bus, saved = Job(steps=3), Bus(), []
    bus.on("checkpoint_committed", lambda event: saved.append(event.progress.iter))

    @bus.on("after_train_iter", once=1)
    def ask(event):
        event.run.checkpoint_now()
        event.run.stop()

    with job.run(bus, work_dir=tmp_path) as run:
        job.train(run, 2)
    assert run.counters.iter == 3
    assert (tmp_path / "iter_3.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:resuming reads and drops")  # the loaders of Accelerate cannot skip
@pytest.mark.parametrize("when", [5, 8, 11])
@pytest.mark.parametrize("early", [True, False])
def test_accelerates_own_checkpoint_carries_the_run_and_goes_on_exactly(tmp_path, when, early):
    def make():
        job, bus, hook, ema = Job(), Bus(), Counting(), EMAHook(momentum=0.1)
        bus.add(hook, ema)
        return job, bus, hook, ema

    whole, bus, hook, ema = make()
    with whole.run(bus) as run:
        whole.train(run, 3)
    counters = run.counters

    cut, bus, *_ = make()
    with cut.run(bus) as run:

        def save():
            if run.progress.iter + 1 == when:
                cut.accelerator.save_state(tmp_path / "state")
                run.stop()

        cut.train(run, 3, save)

    rest, bus, counted, average = make()
    run = rest.run(bus)
    if early:
        rest.accelerator.load_state(tmp_path / "state")
    with run:
        if not early:
            rest.accelerator.load_state(tmp_path / "state")
        rest.train(run, 3)
    assert counted.seen == hook.seen
    assert len(hook.iters) == 24
    assert run.counters == counters
    assert_same(rest.weights(), whole.weights())
    assert_same(average.average.tensors, ema.average.tensors)


@pytest.mark.parametrize("hook", [None, EMAHook])
def test_what_accelerate_saves_itself_is_not_saved_again(tmp_path, hook):
    job, bus = Job(), Bus()
    if hook is not None:
        bus.add(hook())
    with job.run(bus) as run:
        job.train(run, 1)
        job.accelerator.save_state(tmp_path)
    entry = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert "optimizer" not in entry
    assert ("state_dict" in entry) is (hook is not None)


def test_a_state_is_saved_and_loaded_only_where_it_makes_sense(tmp_path):
    job = Job()
    with job.run(Bus()) as run:
        job.train(run, 1)
        with pytest.raises(TrainingError, match="before training begins"):
            job.accelerator.save_state(tmp_path)
            job.accelerator.load_state(tmp_path)
    with pytest.raises(TrainingError, match=r"accelerator\.save_state\(\) can only be called in a run"):
        job.accelerator.save_state(tmp_path / "late")
    torch.save({"other": 1}, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
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
    with pytest.raises(ConfigurationError, match=r"give an accelerate\.Accelerator"):
        Run(Bus(), model=nn.Linear(1, 1), accelerator=object())
