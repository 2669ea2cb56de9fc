"""From text to hooks, models and loops: what a configuration names, typed by the signatures of what it names.

``read`` reads TOML, YAML and JSON, ``overrides`` what is changed on the command line; ``options`` derives a typed struct from a
signature, ``references`` resolves ``module:attribute``, ``make`` makes objects of both; ``hook_list`` does it for hooks,
``elsewhere`` for hooks as other systems write them.
"""

from eventloop.config.annotations import describe
from eventloop.config.elsewhere import Migration, OptionChange, PriorityScale, register_migrations, register_priorities
from eventloop.config.hook_list import Chosen, add_hooks, hook_from, hooks_in, merged
from eventloop.config.make import Maker
from eventloop.config.options import Option, Options, OptionsOf
from eventloop.config.overrides import override
from eventloop.config.places import check_keys, inside, shortened, wrong
from eventloop.config.read import SUFFIXES, read
from eventloop.config.references import Imports, find_files_in
from eventloop.config.registry import Registered, find, register, registered, registrable
from eventloop.config.values import FromText, kind_of, settle

__all__ = [
    "SUFFIXES",
    "Chosen",
    "FromText",
    "Imports",
    "Maker",
    "Migration",
    "Option",
    "OptionChange",
    "Options",
    "OptionsOf",
    "PriorityScale",
    "Registered",
    "add_hooks",
    "check_keys",
    "describe",
    "find",
    "find_files_in",
    "hook_from",
    "hooks_in",
    "inside",
    "kind_of",
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
    "wrong",
]
