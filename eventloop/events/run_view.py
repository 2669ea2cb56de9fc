"""What an event may know of the run that published it.

Events stand below the training package, so they name the run through this protocol and never through
:class:`eventloop.training.Run` itself (an import under ``TYPE_CHECKING`` would break msgspec's decoder).
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
        """What the random generators were seeded with, if they were."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What the user gave as the configuration of the run, for the record."""

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
        """Where batches are moved to."""

    @property
    def rank(self) -> int:
        """Which of the processes that train together this is; 0 where there is one."""

    @property
    def world_size(self) -> int:
        """How many processes train together."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """What the current iteration has reported so far."""

    @property
    def training(self) -> bool:
        """True from ``before_train`` to the end of training: a validation that is part of it, and not ``loop.val()``."""

    @property
    def validates(self) -> bool | None:
        """Whether validations belong to the training; None in a loop of the user's own that has made none yet."""

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
        """Training batches per epoch, or None where the loader does not know."""

    @property
    def evaluation_length(self) -> int | None:
        """Batches in the validation or test under way (or the last one), or None where the loader does not know."""

    @property
    def total_iters(self) -> int | None:
        """Iterations this run is going to make in all, or None where that cannot be known."""

    @property
    def info(self) -> MutableMapping[str, Any]:
        """Facts that hooks leave for each other, such as ``info["train/lr"]``; plain values are kept in checkpoints."""

    @property
    def shared(self) -> Shared:
        """What hooks keep for each other in typed slots while the run goes on."""

    def publish(self, event: type[Any], **payload: Any) -> None:
        """Publish an event of this class, with this run and its progress filled in where it has fields for them."""

    def report(self, **entries: Any) -> None:
        """Add entries to the current iteration's ``outputs``: numbers or tensors of one element, which stay on their device."""

    def report_image(self, name: str, image: Any) -> None:
        """Publish an image of the current moment, for loggers (see ``Run.report_image``)."""

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost open scope ends, however it ends; last registered, first called."""

    def stop(self, reason: str = "") -> None:
        """End the run at the next safe mount point."""

    def pause(self) -> None:
        """Wait at the next safe mount point until :meth:`resume`."""

    def resume(self) -> None:
        """Go on after :meth:`pause`."""

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
        """Have ``resume="auto"`` search ``directory`` as well; for hooks that save there, before the run begins."""

    def note_options(self, owner: str, options: Any) -> None:
        """Note options that a checkpoint overrides; a resume warns of those that the program gives in another way now."""

    def check_savable(self, **options: Any) -> list[str]:
        """Raise now what would be wrong with a save; return the keys of its checkpoint (see ``Run.check_savable``)."""

    def wait_for_saves(self) -> None:
        """Wait until nothing is being written."""

    def apply_state(self, from_: Mapping[str, Any]) -> None:
        """Have the run go on from the state in this checkpoint of another program; in handlers of ``before_run``."""
