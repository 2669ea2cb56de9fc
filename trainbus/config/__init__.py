"""Create hooks, models and loops from a configuration, with options typed by signatures.

- ``read``: reads files and applies changes of the command line.
- ``names``: resolves ``module:attribute``, names of other systems, and the descriptions of options.
- ``make``: creates objects by their signatures.
- ``setup``: creates hooks and a whole loop.
"""

from typing import TYPE_CHECKING

from trainbus.config.read import override, read
from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.config.names import (
        Migration,
        OptionChange,
        PriorityScale,
        option_descriptions,
        register_migrations,
        register_priorities,
    )
    from trainbus.config.setup import Setup, add_hooks
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Migration",
    "OptionChange",
    "PriorityScale",
    "Setup",
    "add_hooks",
    "option_descriptions",
    "override",
    "read",
    "register_migrations",
    "register_priorities",
]
