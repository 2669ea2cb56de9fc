"""A small trainer with callbacks, in place of yours: the page "Write a bridge" attaches a bus to it."""

from pathlib import Path

import torch


class Trainer:
    """Train a model; call ``on_*`` methods of callbacks; save and resume between two batches."""

    def __init__(self, model, optimizer, loss, *, epochs, callbacks=()):
        self.model, self.optimizer, self.loss, self.epochs = model, optimizer, loss, epochs
        self.callbacks = list(callbacks)
        self.epoch = self.step = self.batch_index = 0
        self.should_stop = False

    def fit(self, data, *, resume=None):
        self.epoch = self.step = self.batch_index = 0
        self.should_stop = False
        if resume is not None:
            self.load(resume)
        self.call("on_fit_start", data)
        while self.epoch < self.epochs and not self.should_stop:
            self.call("on_epoch_start")
            for batch in data[self.batch_index :]:
                self.call("on_batch_start", batch)
                loss = self.loss(self.model, batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                self.batch_index += 1
                self.call("on_batch_end", loss.detach())
                if self.should_stop:
                    break
            else:
                self.epoch, self.batch_index = self.epoch + 1, 0
                self.call("on_epoch_end")
        self.call("on_fit_end")

    def call(self, name, *arguments):
        for callback in self.callbacks:
            getattr(callback, name, lambda *_: None)(*arguments)

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"epoch": self.epoch, "step": self.step, "batch_index": self.batch_index}
        self.call("on_save", state, path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step, self.batch_index = state["epoch"], state["step"], state["batch_index"]
        self.call("on_load", state, path)
