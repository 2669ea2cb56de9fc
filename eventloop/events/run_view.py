"""The protocol of the run that events refer to.

Events must not import the training package, so they use this protocol instead of :class:`eventloop.training.Run` (an import
under ``TYPE_CHECKING`` would break msgspec's decoder).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import torch

from eventloop.events.shared import Shared


class RunView(Protocol):
    """The run as its hooks see it.

    ``stop``, ``pause``, ``resume``, ``set_lr`` and ``checkpoint_now`` are safe from any thread and from signal handlers, the
    rest from the training thread.
    """

    @property
    def name(self) -> str:
        """Name of the experiment."""

    @property
    def seed(self) -> int | None:
        """Seed of the random generators, or None."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The user's configuration of the run."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, or the first of several."""

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        """All models by name; a single one is named ``"model"``."""

    @property
    def unwrapped_model(self) -> torch.nn.Module:
        """The model inside the wrappers around it (DDP, FSDP, ``torch.compile``, Accelerate)."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """All optimizers by name; a single one is named ``"optimizer"``."""

    @property
    def work_dir(self) -> Path | None:
        """Folder for the files of this run, if it has one."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""

    @property
    def rank(self) -> int:
        """Rank of this process; 0 in a single process."""

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Outputs that the current iteration has reported so far."""

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training, including its validations; False in ``loop.val()``."""

    @property
    def validates(self) -> bool | None:
        """True if the training has validations; None in the user's own loop before its first validation."""

    @property
    def updated(self) -> bool:
        """True if an optimizer has stepped in the current iteration."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if ``optimizer``, one of this run, has stepped in the current iteration."""

    @property
    def last_batch(self) -> bool:
        """True if the current training batch is the last one of its epoch (or of an iteration-based run)."""

    @property
    def train_data(self) -> Iterable[Any] | None:
        """The loader of the training data; None before the first training epoch."""

    @property
    def epoch_length(self) -> int | None:
        """Training batches per epoch, or None if the loader has no length."""

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the present (or last) validation or test, or None if the loader has no length."""

    @property
    def total_iters(self) -> int | None:
        """Total number of iterations of this run, or None if it is unknown."""

    @property
    def info(self) -> MutableMapping[str, Any]:
        """Facts that hooks leave for each other, such as ``info["train/lr"]``; plain values are kept in checkpoints."""

    @property
    def shared(self) -> Shared:
        """Data that hooks share in typed slots during the run."""

    def publish(self, event: type[Any], **payload: Any) -> None:
        """Publish an event of this class; fields ``run`` and ``progress`` are filled in."""

    def report(self, **entries: Any) -> None:
        """Add entries to the current iteration's ``outputs``: numbers or tensors of one element, which stay on their device."""

    def report_image(self, name: str, image: Any) -> None:
        """Publish an image for loggers (see ``Run.report_image``)."""

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost open scope ends, also by an exception; last registered, first called."""

    def stop(self, reason: str = "") -> None:
        """End the run at the next safe mount point."""

    def pause(self) -> None:
        """Wait at the next safe mount point until :meth:`resume`."""

    def resume(self) -> None:
        """Continue after :meth:`pause`."""

    def set_lr(self, lr: float, optimizer: str | int | None = None) -> None:
        """Set the learning rate at the next safe mount point, of all optimizers or of one (see ``Run.set_lr``)."""

    def checkpoint_now(self) -> None:
        """Save at the next safe mount point, under ``iter_<n>.safetensors`` in the work dir."""

    def request_save(
        self,
        name: str,
        *,
        directory: Any = None,
        leave_out: Collection[str] = (),
        on_error: Any = "raise",
        staging: Any = "block",
        busy: Any = "wait",
    ) -> None:
        """Save under ``name`` once the last subscriber of the current mount point has run (see ``Run.request_save``)."""

    def keeps_checkpoints_in(self, directory: Any) -> None:
        """Let ``resume="auto"`` also search ``directory``; hooks that save there call it in ``before_run``."""

    def note_options(self, owner: str, options: Any) -> None:
        """Record options that a checkpoint overrides; a resume warns about options that have changed."""

    def check_savable(self, **options: Any) -> list[str]:
        """Raise the errors that a save would raise; return the keys of its checkpoint (see ``Run.check_savable``)."""

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written."""

    def apply_state(self, from_: Mapping[str, Any]) -> None:
        """Resume the run from the state in another program's checkpoint; call it in handlers of ``before_run``."""
