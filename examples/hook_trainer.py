"""A trainer in the shape of detectron2's: ``python examples/hook_trainer.py``. Killed, it goes on bit for bit.

It has hooks of its own, a storage of numbers, and a ``run_step``, whose lines stay where they are. One of its hooks validates,
another one steps a schedule. It learns which of four numbers is the largest.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Bus, CheckpointHook, LoggerHook, PreemptionHook, Run

MAX_ITER, EVAL_PERIOD = 120, 30


class EventStorage:
    """Hold the numbers of an iteration."""

    def __init__(self, start_iter):
        self.iter, self.scalars = start_iter, {}

    def put_scalar(self, name, value):
        self.scalars[name] = value

    def step(self):
        self.iter, self.scalars = self.iter + 1, {}


class HookBase:
    """Act before and after the training, and before and after each step."""

    trainer: "Trainer"

    def before_train(self): ...

    def after_train(self): ...

    def before_step(self): ...

    def after_step(self): ...


class Trainer:
    """Call ``run_step`` and the hooks for each iteration."""

    def __init__(self, run, loader):
        self.tb, self.drive, self.loader, self.hooks = run, run.drive(), loader, []
        self.model, self.optimizer = run.model, run.optimizers["optimizer"]

    def register_hooks(self, hooks):
        for hook in hooks:
            hook.trainer = self
        self.hooks += hooks

    def train(self, max_iter):
        self.drive.begin_train(max_iters=max_iter)
        self.iter = start_iter = self.tb.progress.iter  # not 0 in a resumed run
        self.storage = EventStorage(start_iter)
        for hook in self.hooks:
            hook.before_train()
        self._data_iter = iter(self.drive.begin_epoch(self.loader, endless=True))  # begins the loader anew at its end
        for self.iter in range(start_iter, max_iter):
            for hook in self.hooks:
                hook.before_step()
            self.run_step()
            for hook in self.hooks:
                hook.after_step()
            self.drive.end_iteration(self.storage.scalars)
            self.storage.step()
            if self.drive.should_stop():
                self.drive.abandon_epoch()  # a resumed run continues in it
                break
        else:
            self.drive.end_epoch()
        for hook in self.hooks:
            hook.after_train()
        self.drive.end_train()

    def run_step(self):
        batch = next(self._data_iter)
        self.drive.begin_iteration(batch)
        inputs, targets = batch
        loss = cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.storage.put_scalar("total_loss", loss.detach())


class LRScheduler(HookBase):
    """Step a schedule of torch."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def after_step(self):
        self.trainer.storage.put_scalar("lr", self.trainer.optimizer.param_groups[0]["lr"])
        self.scheduler.step()


class EvalHook(HookBase):
    """Validate at each ``period`` iterations."""

    def __init__(self, period, loader):
        self.period, self.loader, self.accuracy = period, loader, 0.0

    def after_step(self):
        if (self.trainer.iter + 1) % self.period:
            return
        drive, model = self.trainer.drive, self.trainer.model
        for batch in drive.begin_evaluation("val", self.loader):
            drive.begin_evaluation_iteration(batch)
            inputs, targets = batch
            drive.end_evaluation_iteration({"accuracy": (model(inputs).argmax(1) == targets).float().mean()})
        self.accuracy = drive.end_evaluation()["accuracy"]


def train(work_dir, hooks=()):
    """Train, and return the model and the last accuracy."""
    torch.manual_seed(0)
    inputs = torch.randn(640, 4)
    data = TensorDataset(inputs, inputs.argmax(1))
    first, last = torch.utils.data.random_split(data, [512, 128])
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.3)
    saves = CheckpointHook(interval=20, by_epoch=False, save_best="accuracy")
    bus = Bus(saves, LoggerHook(interval=EVAL_PERIOD), PreemptionHook(), *hooks)
    states = {"schedule": schedule}
    with Run(bus, model=model, optimizer=optimizer, stateful=states, work_dir=work_dir, seed=0, resume="auto") as run:
        trainer = Trainer(run, DataLoader(first, batch_size=32, shuffle=True))
        judge = EvalHook(EVAL_PERIOD, DataLoader(last, batch_size=32))
        trainer.register_hooks([LRScheduler(schedule), judge])
        trainer.train(MAX_ITER)
    return model, judge.accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hook_trainer"))
