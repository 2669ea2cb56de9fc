"""From text to hooks, models and loops: the objects that a configuration names, typed by their own signatures.

``read`` reads files and applies changes of the command line, ``names`` has registered classes and resolves
``module:attribute``, ``make`` makes objects by signature; ``hook_list`` makes hooks, ``setup`` a whole loop.
"""

from eventloop.config.hook_list import Chosen, add_hooks, hook_from, hooks_in, merged
from eventloop.config.make import Maker, OptionsOf, Signature, describe
from eventloop.config.migrations import Migration, OptionChange, PriorityScale, register_migrations, register_priorities
from eventloop.config.names import Imports, Registered, find, find_files_in, register, registered, registrable
from eventloop.config.read import SUFFIXES, override, read, settle, shortened

__all__ = [
    "SUFFIXES",
    "Chosen",
    "Imports",
    "Maker",
    "Migration",
    "OptionChange",
    "OptionsOf",
    "PriorityScale",
    "Registered",
    "Signature",
    "add_hooks",
    "describe",
    "find",
    "find_files_in",
    "hook_from",
    "hooks_in",
    "merged",
    "override",
    "read",
    "register",
    "register_migrations",
    "register_priorities",
    "registered",
    "registrable",
    "settle",
    "shortened",
]
