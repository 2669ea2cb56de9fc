"""Names, options, priorities, files and hooks of other systems: MMEngine, iMIX and Pointrix."""

from trainbus.compat import imix, pointrix
from trainbus.compat.dcp import DCP_CHECKPOINTS
from trainbus.compat.guests import GUESTS, find_in_mmengine
from trainbus.compat.mmengine import names
from trainbus.compat.mmengine.checkpoints import MMENGINE_CHECKPOINTS
from trainbus.compat.transformers_guests import TransformersHook
from trainbus.config import Migration, register_migrations, register_priorities
from trainbus.eventloop.bus import register_guests
from trainbus.eventloop.checkpoint import register_format
from trainbus.eventloop.registry import register_finder

__all__ = ["TABLE", "TransformersHook"]

TABLE: tuple[Migration, ...] = (*names.TABLE, *imix.TABLE, *pointrix.TABLE)
"""Every hook of these systems, with its name and options in trainbus."""


register_migrations(TABLE)
register_priorities(imix.PRIORITIES)
register_format(MMENGINE_CHECKPOINTS)
register_format(DCP_CHECKPOINTS)
register_guests(*GUESTS)
register_finder(find_in_mmengine)
