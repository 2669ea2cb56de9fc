"""Optimizers and loaders inside the wrappers of other libraries: Accelerate's own, and torchft's optimizer in a stand-in."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, ConfigurationError, Run
from hooks import CheckpointHook, EMAHook


class Manager:
    """Does of torchft's manager what its optimizer asks for, and notes the order."""

    def __init__(self):
        self.asked, self.commits = [], True

    def start_quorum(self):
        self.asked.append("quorum")

    def should_commit(self):
        self.asked.append("commit")
        return self.commits


class OptimizerWrapper(torch.optim.Optimizer):
    """torchft 0.1's, which cannot be installed here: the same methods and attributes, and no more.

    It never calls ``Optimizer.__init__``, and has no ``defaults``.
    """

    def __init__(self, manager, optim):
        self.optim = optim
        self.manager = manager

    def add_param_group(self, group):
        self.optim.add_param_group(group)

    def load_state_dict(self, state):
        self.optim.load_state_dict(state)

    def state_dict(self):
        return self.optim.state_dict()

    def zero_grad(self, set_to_none=True):
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure=None):
        assert closure is None
        if self.manager.should_commit():
            self.optim.step()

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)


class Uninitialised(torch.optim.Optimizer):
    def __init__(self): ...


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_torchft(model):
    return OptimizerWrapper(Manager(), momentum(model))


def accelerator(**options):
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.utils.DataLoaderConfiguration(**options)
    return accelerate.Accelerator(cpu=True, dataloader_config=config)


def in_accelerate(model):
    return accelerator().prepare(momentum(model))


@pytest.mark.parametrize("wrapped", [in_torchft, in_accelerate])
@pytest.mark.parametrize("staging", ["block", "overlap"])
def test_a_train_loop_counts_saves_and_resumes_the_steps_of_a_wrapped_optimizer(parts, tmp_path, wrapped, staging):
    def train(folder, make, **how):
        bus = Bus()
        bus.add(EMAHook(), CheckpointHook(1, staging=staging))
        stepped = []
        bus.on("after_optimizer_step", lambda e: stepped.append((e.optimizer, e.run.stepped(e.optimizer))))
        model = parts.model()
        optimizer = make(model)
        loop = parts.loop(bus, model=model, optimizer=optimizer, work_dir=tmp_path / folder, **how)
        loop.run(resume="auto")
        assert stepped == [(optimizer, True)] * len(stepped)
        return parts.weights(model), loop.counters.update, len(stepped)

    plain, updates, _ = train("plain", momentum)
    assert updates == 6
    train("wrapped", wrapped, max_epochs=1)
    resumed, updates, steps = train("wrapped", wrapped)
    assert (updates, steps) == (6, 3)
    parts.assert_same(resumed, plain)


@pytest.mark.parametrize("wrapped", [in_torchft, in_accelerate])
def test_a_users_own_loop_counts_the_steps_of_a_wrapped_optimizer(parts, bus, wrapped):
    model = parts.model()
    with Run(bus, model=model, optimizer=wrapped(model)) as run:
        parts.train(run, parts.batches(3))
    assert run.progress.update == 3


def test_an_uncommitted_torchft_step_is_not_an_update(parts, bus):
    model = parts.model()
    optimizer = in_torchft(model)
    asked, optimizer.manager.commits = optimizer.manager.asked, False

    def step(model, batch):
        asked.append("forward")
        return parts.step(model, batch)

    loop = parts.loop(bus, model=model, optimizer=optimizer, step=step, val_data=None, max_epochs=1)
    loop.run()
    assert asked == ["quorum", "forward", "commit"] * 3
    assert loop.counters.update == 0


def test_a_wrapper_without_an_optimizer_is_an_error_at_construction(parts, bus):
    with pytest.raises(ConfigurationError, match="Uninitialised"):
        Run(bus, model=parts.model(), optimizer=Uninitialised())


@pytest.mark.filterwarnings("ignore:resuming reads and drops")
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("stop_at", [5, 8])
def test_a_resume_keeps_the_order_of_accelerates_loaders(parts, tmp_path, seedable, stop_at):
    def train(folder, stop=None):
        torch.manual_seed(3)
        data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8)), batch_size=2, shuffle=True)
        val = DataLoader(TensorDataset(torch.randn(4, 4), torch.arange(4)), batch_size=2, shuffle=True)
        model = parts.model()
        prepare = accelerator(use_seedable_sampler=seedable).prepare
        model, optimizer, data, val = prepare(model, momentum(model), data, val)
        bus, seen = Bus(), []
        bus.on("before_iter", lambda e: seen.append((e.progress.stage, *e.batch[1].tolist())))
        if stop:
            bus.on("after_train_iter", lambda e: (e.run.checkpoint_now(), e.run.stop()), once=stop)
        step = lambda model, batch: parts.step(model, (batch[0], batch[1] % 3))  # noqa: E731
        options = {"train_data": data, "val_data": val, "max_epochs": 3, "work_dir": tmp_path / folder}
        parts.loop(bus, model=model, optimizer=optimizer, step=step, **options).run(resume="auto")
        return seen, parts.weights(model)

    whole, weights = train("whole")
    first, _ = train("cut", stop=stop_at)
    rest, resumed = train("cut")
    assert first + rest == whole
    parts.assert_same(resumed, weights)
