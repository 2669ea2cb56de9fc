"""Compute the Trainer's log lines: the mean loss since the last line, the gradient norm, the learning rate, and speeds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers.trainer_utils import denumpify_detensorize, speed_metrics

from trainbus.eventloop.checkpoint import unwrapped
from trainbus.eventloop.events import Progress, RunView


class LogLines:
    """Collect the values for the log lines of a training, without waiting for a device in between.

    ``nan_filter`` replaces a loss that is not finite by the mean of those before it, as ``args.logging_nan_inf_filter``.
    """

    def __init__(self, run: RunView, *, nan_filter: bool) -> None:
        self.flos = 0.0  # floating-point operations since the last line or save
        self.logged = 0  # the step of the last line
        self._run = run
        self._filter = nan_filter
        self._window: list[Any] = []  # losses of the steps' iterations so far
        self._loss: torch.Tensor | None = None  # sum over the steps since the last line
        self._before = 0.0  # sum over the steps before it
        self._norm: Any = None
        self._rate: Any = None
        self._from = 0  # the step before the first loss
        self._begun_at = (0, 0)  # step and iteration
        self._begun = time.time()
        self._parameters: int | None = None

    def begin(self, progress: Progress, *, resumed: bool) -> None:
        """Begin a training; a resumed one has the losses of its checkpoint."""
        self._begun_at, self._begun = (progress.update, progress.iter), time.time()
        if not resumed:
            self.logged = self._from = progress.update

    def before_iteration(self) -> None:
        """Take the learning rate, before a schedule steps."""
        optimizer = next(iter(self._run.optimizers.values()), None)
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        self._rate = rate.clone() if isinstance(rate, torch.Tensor) else rate

    def add_iteration(self, outputs: Mapping[str, Any], batch: Any) -> None:
        loss = outputs.get("loss")
        if loss is not None:
            self._window.append(loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss)))
        self._norm = outputs.get("grad_norm")
        self.flos += self._operations(batch)

    def close_window(self, step: int) -> None:
        """Add the mean loss of a step's iterations."""
        for loss in self._window:
            total = torch.zeros((), device=loss.device) if self._loss is None else self._loss
            share = loss / len(self._window)
            if self._filter:
                share = torch.where(torch.isfinite(share), share, total / (1 + step - self.logged))
            self._loss = total + share
        self._window.clear()

    def line(self, step: int) -> dict[str, Any]:
        """Return the training's scalars since the last line."""
        logs: dict[str, Any] = {}
        if self._loss is not None:
            loss = float(self._loss)
            logs["loss"] = loss / (step - self.logged)
            self._before += loss
            self._loss = None
        norm = self._norm if self._norm is not None else self._norm_now()
        if norm is not None:
            logs["grad_norm"] = float(norm)
        if self._rate is not None:
            logs["learning_rate"] = float(self._rate)
        self.logged = step
        return logs

    def summary(self, progress: Progress, total_flos: float) -> dict[str, Any]:
        run, (step, iteration) = self._run, self._begun_at
        samples = number_of_samples(run.data.train)
        seen = samples * (progress.iter - iteration) / run.data.epoch_length if samples and run.data.epoch_length else None
        logs = speeds("train", self._begun, seen, progress.update - step)
        self._before += 0.0 if self._loss is None else float(self._loss)
        self._loss = None
        loss = self._before / max(progress.update - self._from, 0.001)  # like the Trainer: no division by zero
        return logs | {"total_flos": total_flos, "train_loss": loss}

    def state_dict(self) -> dict[str, Any]:
        loss = None if self._loss is None else self._loss.clone()
        return {"loss": loss, "before": self._before, "logged": self.logged, "from": self._from, "flos": self.flos}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loss, self._before, self.logged, self._from = state["loss"], state["before"], state["logged"], state["from"]
        self.flos = state["flos"]
        if self._loss is not None:
            self._loss = self._loss.to(self._run.device)

    def _norm_now(self) -> Any:
        optimizers = self._run.optimizers.values()
        tensors = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients) if gradients else None
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded: sum over ranks

    def _operations(self, batch: Any) -> float:
        # As the Trainer's floating_point_ops; the number of parameters is counted once.
        model: Any = unwrapped(self._run.model)
        name = getattr(model, "main_input_name", "input_ids")
        if not isinstance(batch, Mapping) or name not in batch or not hasattr(model, "num_parameters"):
            return 0.0
        if self._parameters is None:
            self._parameters = int(model.num_parameters(exclude_embeddings=True))
        return 6.0 * int(batch[name].numel()) * self._parameters


def number_of_samples(loader: Any) -> int | None:
    """Return the number of samples of a loader's dataset; None if it is unknown."""
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def speeds(prefix: str, begun: float, samples: float | None, steps: int | None) -> dict[str, Any]:
    """Return the seconds since ``begun``, and the samples and steps per second."""
    found: dict[str, Any] = speed_metrics(prefix, begun, num_samples=samples, num_steps=steps)
    return found


def named(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers, with the prefix before their names, and the loss first."""
    plain: dict[str, Any] = denumpify_detensorize(dict(metrics))
    ordered = sorted(plain, key=lambda name: name != "loss")
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": plain[name] for name in ordered}
