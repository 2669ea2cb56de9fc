"""``trainbus config``: what a configuration may contain."""

from __future__ import annotations

from pathlib import Path

from trainbus.cli.common import Modules, write_json


def schema(*, imports: Modules = None) -> None:
    """Write the JSON schema of configurations, from which editors complete and check them.

    Write it to a file, trainbus config schema > trainbus.schema.json, and name that in the first line of a .toml file:
    #:schema ./trainbus.schema.json (Even Better TOML, Taplo), or of a .yaml file: # yaml-language-server: $schema=...

    Args:
        imports: a module of yours that registers hooks.
    """
    from trainbus.config.defaults import DEFAULT_HOOKS
    from trainbus.config.names import Imports
    from trainbus.config.schema import schema_of

    Imports(imports or (), [Path.cwd()])
    write_json(schema_of(DEFAULT_HOOKS))
