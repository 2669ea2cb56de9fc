"""Create hooks, models and loops from a configuration, with options typed by signatures.

- ``read``: reads files and applies changes of the command line.
- ``names``: registers classes, reads the descriptions of their options, and resolves ``module:attribute``.
- ``make``: creates objects by their signatures.
- ``setup``: creates hooks and a whole loop.
"""

from trainbus.config.names import (
    Migration,
    OptionChange,
    PriorityScale,
    Registered,
    find,
    option_descriptions,
    register,
    register_finder,
    register_migrations,
    register_priorities,
    registered,
    registrable,
)
from trainbus.config.read import override, read
from trainbus.config.setup import Setup, add_hooks
from trainbus.eventloop.annotations import OptionsOf

__all__ = [
    "Migration",
    "OptionChange",
    "OptionsOf",
    "PriorityScale",
    "Registered",
    "Setup",
    "add_hooks",
    "find",
    "option_descriptions",
    "override",
    "read",
    "register",
    "register_finder",
    "register_migrations",
    "register_priorities",
    "registered",
    "registrable",
]
