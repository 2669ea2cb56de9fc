"""The protocol of the run that events refer to: ``Run`` of :mod:`trainbus.eventloop.training` without the members for loops.

Its members are in ``run_view.pyi``, for type checkers only: events must not import the rooms above them, not even under
``TYPE_CHECKING``, which would break msgspec's decoder.
"""

from typing import Protocol


class RunView(Protocol):
    """The run as its hooks see it; :class:`trainbus.eventloop.Run` documents the members.

    ``stop``, ``pause``, ``unpause``, ``set_lr`` and ``checkpoints.save()`` are safe from any thread and from signal handlers,
    the rest from the training thread.
    """
