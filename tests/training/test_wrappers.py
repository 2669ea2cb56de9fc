"""Optimizers and loaders inside the wrappers of other libraries: Accelerate's own, and torchft's optimizer in a stand-in."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.hooks import CheckpointHook, EMAHook


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
        bus.on("after_optimizer_step", lambda e: stepped.append((e.optimizer, e.run.steps.of(e.optimizer))))
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
            bus.on("after_train_iter", lambda e: (e.run.checkpoints.save(), e.run.stop()), once=stop)
        step = lambda model, batch: parts.step(model, (batch[0], batch[1] % 3))  # noqa: E731
        options = {"train_data": data, "val_data": val, "max_epochs": 3, "work_dir": tmp_path / folder}
        parts.loop(bus, model=model, optimizer=optimizer, step=step, **options).run(resume="auto")
        return seen, parts.weights(model)

    whole, weights = train("whole")
    first, _ = train("cut", stop=stop_at)
    rest, resumed = train("cut")
    assert first + rest == whole
    parts.assert_same(resumed, weights)


class Sam(torch.optim.Optimizer):
    """Two backward passes for a step, as in https://github.com/davda54/sam: `second_step` steps the optimizer inside."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self):
        for parameter in (one for group in self.param_groups for one in group["params"]):
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for parameter in (one for group in self.param_groups for one in group["params"]):
            parameter.copy_(self.state[parameter]["old"])
        self.base.step()

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure()
        self.first_step()
        closure()
        self.second_step()


CLOSED = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3),
    "Sam": lambda model: Sam(torch.optim.SGD(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_an_optimizer_that_needs_a_closure_is_an_error_of_a_train_loop_with_the_way_out(parts, kind):
    model = parts.model()
    with pytest.raises(ConfigurationError, match=rf"{kind}\.step\(\).*closure.*run\.train"):
        parts.loop(model=model, optimizer=CLOSED[kind](model), val_data=None).run()


@pytest.mark.parametrize("kind", [*CLOSED, "Sam in halves"])
def test_an_optimizer_with_a_closure_counts_saves_and_resumes_in_a_users_own_loop(parts, tmp_path, kind):
    def train(folder, epochs):
        model = parts.model()
        optimizer = CLOSED[kind.partition(" ")[0]](model)
        bus = Bus(CheckpointHook(interval=1))
        with Run(bus, model=model, optimizer=optimizer, work_dir=tmp_path / folder, resume="auto") as run:
            for _ in run.epochs(epochs):
                for batch in run.train(parts.batches(3)):

                    def closure(batch=batch):
                        optimizer.zero_grad()
                        loss = parts.step(model, batch)
                        loss.backward()
                        return loss

                    if kind == "Sam in halves":
                        closure()
                        optimizer.first_step()
                        closure()
                        optimizer.second_step()
                    else:
                        optimizer.step(closure)
        assert run.progress.update == run.progress.iter == 3 * epochs
        return parts.weights(model)

    whole = train("whole", 2)
    train("parts", 1)
    parts.assert_same(train("parts", 2), whole)


class ScheduleFree(torch.optim.Optimizer):
    """Weights to train and others to evaluate, as in https://github.com/facebookresearch/schedule_free."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _move(self, mode, weight):
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = mode

    def train(self):
        self._move(True, 1 - 0.9)

    def eval(self):
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "Optimizer was not in train mode when step is called"
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("by", ["epoch", "validation"])
def test_a_schedule_free_optimizer_trains_and_validates_in_its_own_modes_and_resumes_bitwise(parts, tmp_path, by):
    modes = {"train": {True}, "val": {False}}

    def train(folder, stop=False):
        model = parts.model()
        optimizer = ScheduleFree(model.parameters())
        bus, seen = Bus(CheckpointHook(interval=1)), {"train": set(), "val": set()}
        bus.on("before_iter", lambda e: seen[e.progress.stage].add(optimizer.param_groups[0]["train_mode"]), priority=95)
        if stop and by == "validation":
            bus.on("after_val_epoch", lambda e: (e.run.checkpoints.save(), e.run.stop()), once=1)
        epochs = 1 if stop and by == "epoch" else 2
        parts.loop(bus, model=model, optimizer=optimizer, max_epochs=epochs, work_dir=tmp_path / folder).run(resume="auto")
        assert seen == modes
        return parts.weights(model), optimizer.state_dict()

    whole = train("whole")
    train("parts", stop=True)
    parts.assert_same(train("parts"), whole)
