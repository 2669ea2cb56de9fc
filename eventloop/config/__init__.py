"""Make hooks, models and loops from a configuration, with options typed by signatures.

``read`` reads files and applies changes of the command line. ``names`` registers classes and resolves ``module:attribute``.
``make`` makes objects by their signatures. ``setup`` makes hooks and a whole loop.
"""

from eventloop.config.make import Maker, OptionsOf, Signature, describe
from eventloop.config.names import (
    Imports,
    Migration,
    OptionChange,
    PriorityScale,
    Registered,
    find,
    find_files_in,
    register,
    register_migrations,
    register_priorities,
    registered,
    registrable,
)
from eventloop.config.read import SUFFIXES, override, read, settle, shortened
from eventloop.config.setup import Chosen, Setup, add_hooks, merged

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
    "Setup",
    "Signature",
    "add_hooks",
    "describe",
    "find",
    "find_files_in",
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
