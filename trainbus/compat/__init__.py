"""Names, options, priorities, files and hooks of other systems: MMEngine, iMIX and Pointrix."""

from trainbus.compat import imix, pointrix
from trainbus.compat.guests import GUESTS, find_in_mmengine
from trainbus.compat.mmengine import names
from trainbus.compat.mmengine.checkpoints import MMENGINE_CHECKPOINTS, OBJECTS
from trainbus.compat.transformers_guests import TransformersHook
from trainbus.config import Migration, register_migrations, register_priorities
from trainbus.convert import register_objects
from trainbus.eventloop.bus import register_guests
from trainbus.eventloop.registry import register_finder
from trainbus.eventloop.training import register_format

__all__ = ["TABLE", "TransformersHook"]

TABLE: tuple[Migration, ...] = (*names.TABLE, *imix.TABLE, *pointrix.TABLE)
"""Every hook of these systems, with its name and options in trainbus."""


register_migrations(TABLE)
register_priorities(imix.PRIORITIES)
register_format(MMENGINE_CHECKPOINTS)
register_objects(OBJECTS)
register_guests(*GUESTS)
register_finder(find_in_mmengine)
