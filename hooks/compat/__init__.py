"""Names, options, priorities and files of other systems: of MMEngine, iMIX and Pointrix."""

from eventloop.config import Migration, register_migrations, register_priorities
from hooks.compat import imix, mmengine, pointrix

TABLE: tuple[Migration, ...] = (*mmengine.TABLE, *imix.TABLE, *pointrix.TABLE)
"""Every hook of theirs: where it is here, and what its options are called."""


def register_other_systems() -> None:
    """Let configurations use the names, options and priorities of other systems; register the hooks of ours before."""
    register_migrations(TABLE)
    register_priorities(imix.PRIORITIES)
