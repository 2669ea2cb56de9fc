"""From text to hooks, models and loops: the objects that a configuration names, typed by their own signatures.

``read`` reads files and applies changes of the command line, ``signature`` finds the options of a class or function,
``imports`` resolves ``module:attribute``, ``make`` makes the objects; ``hook_list`` makes hooks, ``setup`` a whole loop.
"""

from eventloop.config.hook_list import Chosen, add_hooks, hook_from, hooks_in, merged
from eventloop.config.imports import Imports, find_files_in
from eventloop.config.make import Maker
from eventloop.config.migrations import Migration, OptionChange, PriorityScale, register_migrations, register_priorities
from eventloop.config.read import SUFFIXES, override, read, settle
from eventloop.config.registry import Registered, find, register, registered, registrable
from eventloop.config.signature import Option, OptionsOf, Signature, describe

__all__ = [
    "SUFFIXES",
    "Chosen",
    "Imports",
    "Maker",
    "Migration",
    "Option",
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
]
