"""A bridge: ``attach(bus, trainer)`` for the ``Trainer`` in ``plain/toy_trainer.py``.

python examples/toy_bridge.py
"""

import sys
from pathlib import Path
from typing import ClassVar

import torch

from trainbus import attach, mount_points
from trainbus.bridges import Bridge, TrainerHost
from trainbus.eventloop.bus import HostKind, register_host
from trainbus.eventloop.training import HostedRun, Scope

sys.path.insert(0, str(Path(__file__).parent / "plain"))
from toy_trainer import Trainer

ENTRY = "trainbus"  # the bus's key in the trainer's checkpoints


class ToyBridge(Bridge):
    """A bus in a toy trainer.

    Args:
        bus: the bus.
        trainer: the trainer.
        work_dir: directory for the files of hooks.
    """

    host = "toy_trainer.Trainer"
    trains = "fit"
    missing: ClassVar = {
        **{name: "the trainer neither validates nor tests" for name in mount_points() if "_val" in name or "_test" in name},
        **{
            f"{when}_{what}": "the trainer has no callback there"
            for when in ("before", "after")
            for what in ("forward", "backward")
        },
    }

    def __init__(self, bus, trainer, *, work_dir=None):
        super().__init__(bus, trainer)
        self._work_dir = work_dir
        self._loaded = None

    def install(self):
        """Become a callback, and wrap ``fit``, because callbacks do not hear of exceptions. Detaching undoes both."""
        self.trainer.callbacks.append(self)
        self.on_detach(lambda: self.trainer.callbacks.remove(self))
        fit = self.trainer.fit

        def fit_with_bus(*arguments, **named):
            self._loaded = None
            try:
                fit(*arguments, **named)
            except BaseException as error:
                if self.running is not None:
                    self._host.drive.fail(error)  # publishes on_exception, ends the scopes
                raise

        self.replace(self.trainer, "fit", fit_with_bus)

    # ------------------------------------------------------------------------------------------- the trainer's calls

    def on_fit_start(self, data):
        trainer, host = self.trainer, TrainerHost(".pt")
        self.run = HostedRun(self.bus, model=trainer.model, optimizer=trainer.optimizer, work_dir=self._work_dir, host=host)
        host.train_data, host.epoch_length, self.run.validates = data, len(data), False
        self._host, drive = host, host.drive
        drive.begin_run()
        if self._loaded is not None:
            host.restore_entry(*self._loaded)
        host.watch_steps()  # counts and publishes optimizer steps by torch's step hooks
        drive.begin_train(max_epochs=trainer.epochs)
        self._save_and_stop()

    def on_epoch_start(self):
        self._host.drive.begin_epoch()

    def on_batch_start(self, batch):
        self._host.drive.begin_iteration(batch, last=self.trainer.batch_index + 1 == self.run.data.epoch_length)

    def on_batch_end(self, loss):
        self._host.drive.end_iteration({"loss": loss})
        self._save_and_stop()

    def on_epoch_end(self):
        self._host.drive.end_epoch()
        self._save_and_stop()

    def on_fit_end(self):
        drive = self._host.drive
        if drive.scope is Scope.EPOCH:  # stopped in its middle
            drive.abandon_epoch()
        drive.end_train()
        self._host.saver.write_due(self._save)
        drive.end_run()

    def on_save(self, state, path):
        entry, weights = self._host.gather_entry(str(path))
        state[ENTRY] = entry
        state["model"] = {**state["model"], **weights.get("model", {})}  # hooks may replace some: EMAHook, by averages

    def on_load(self, state, path):
        if ENTRY in state:
            self._loaded = state[ENTRY], str(path)

    # ------------------------------------------------------------------------------------------------- what hooks ask

    def _save_and_stop(self):
        self._host.saver.write_due(self._save)
        if self._host.drive.should_stop():
            self.trainer.should_stop = True

    def _save(self, path):
        with self._host.saver.writing(path):  # publishes checkpoint_committed, or checkpoint_failed
            self.trainer.save(path)


register_host(HostKind("toy_trainer.Trainer", bridge="toy_bridge:ToyBridge", name="toy_trainer.Trainer"))


def main():
    from trainbus import Bus, CheckpointHook, EMAHook, LoggerHook

    torch.manual_seed(0)
    sys.modules.setdefault("toy_bridge", sys.modules[__name__])  # as a script, this module has another name
    model = torch.nn.Linear(4, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        epochs=2,
    )
    bus = Bus(EMAHook(), LoggerHook(interval=4), CheckpointHook(interval=1))
    attach(bus, trainer, work_dir="runs/toy")
    trainer.fit([torch.randn(8, 4) for _ in range(8)])


if __name__ == "__main__":
    main()
