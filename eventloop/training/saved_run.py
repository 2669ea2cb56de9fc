"""``SavedRun``: a run as its parts know it. They hold each other by this module alone, which names them for type checkers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.events import RunView

if TYPE_CHECKING:  # they import this module
    from trainbus.eventloop.training.coordinator import Coordinator
    from trainbus.eventloop.training.data import Feeds
    from trainbus.eventloop.training.host import Host
    from trainbus.eventloop.training.keep import KeptValues
    from trainbus.eventloop.training.saves.checkpointer import Checkpointer
    from trainbus.eventloop.training.state import RunState


class SavedRun(RunView, Protocol):
    """The part of a run that saving and restoring use."""

    name: str
    work_dir: Path | None
    bus: Bus
    state: RunState
    feeds: Feeds
    checkpointer: Checkpointer

    @property
    def host(self) -> Host: ...  # noqa: D102 - as in Run

    stateful: dict[str, Any]
    kept: KeptValues
    options: dict[str, Any]
    moves_models: bool
    exit_code: int

    @property
    def coordinator(self) -> Coordinator: ...  # noqa: D102 - as in Run

    def move_to(self, work_dir: Path) -> None: ...  # noqa: D102 - as in Run
