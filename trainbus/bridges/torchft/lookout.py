"""``Lookout``: say that the groups do not find each other. torchft waits in silence, and then raises a time-out."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from trainbus.bridges.torchft import privates
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.seams import Seam

LOOK: Final = Seam(1.0)
"""Seconds between two looks."""
PATIENCE: Final = Seam(15.0)
"""Seconds without a quorum after which that is said."""

log = get_logger()


class Lookout:
    """A thread that looks whether the manager's lighthouse answers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="trainbus looks for the lighthouse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        waited, told = 0.0, False
        while not self._over.wait(LOOK.value):
            if not privates.waits_for_quorum(self._manager):
                if told:
                    log.info("the lighthouse answers again")
                waited, told = 0.0, False
                continue
            waited += LOOK.value
            if waited >= PATIENCE.value and not told:
                told = True
                log.warning(
                    "torchft has found no quorum of replica groups, and training waits for it: is the lighthouse running, and "
                    "are as many groups as its --min_replicas? After the manager's quorum_timeout this is an error",
                    id="torchft-no-quorum",
                    lighthouse=os.environ.get("TORCHFT_LIGHTHOUSE", "lighthouse_addr of the Manager"),
                    seconds=round(waited),
                )
