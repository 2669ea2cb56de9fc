"""Names, options, priorities, files and hooks of other systems: MMEngine, iMIX and Pointrix."""

from eventloop.bus import register_guests
from eventloop.checkpoint import register_format
from eventloop.config import Migration, register_finder, register_migrations, register_priorities
from hooks.compat import imix, pointrix
from hooks.compat.dcp import DCP_CHECKPOINTS
from hooks.compat.guests import GUESTS, find_in_mmengine
from hooks.compat.mmengine import names
from hooks.compat.mmengine.checkpoints import MMENGINE_CHECKPOINTS

TABLE: tuple[Migration, ...] = (*names.TABLE, *imix.TABLE, *pointrix.TABLE)
"""Every hook of these systems, with its name and options in trainbus."""


def register_other_systems() -> None:
    """Register names, options, priorities, checkpoint formats and hooks of other systems.

    Import trainbus's hooks before.
    """
    register_migrations(TABLE)
    register_priorities(imix.PRIORITIES)
    register_format(MMENGINE_CHECKPOINTS)
    register_format(DCP_CHECKPOINTS)
    register_guests(*GUESTS)
    register_finder(find_in_mmengine)
