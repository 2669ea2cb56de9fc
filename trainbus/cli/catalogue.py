"""``trainbus hooks`` and ``trainbus events``: list registered classes and mount points."""

from __future__ import annotations

from trainbus.cli.common import Modules


def list_hooks(name: str | None = None, /, *, imports: Modules = None, json: bool = False) -> None:
    """List all registered hooks with options, types, defaults and mount points; or show one hook with its descriptions.

    Args:
        name: a hook, a logger's writer, or an average, such as CheckpointHook.
        imports: a module of yours that registers hooks.
        json: print JSON: of each class its kind, summary, options and mount points.
    """
    from trainbus.cli.registered import print_hooks

    print_hooks(name, imports or (), as_json=json)


def list_events(name: str | None = None, /, *, imports: Modules = None, json: bool = False) -> None:
    """List the mount points in the order of a run, with the fields of their events; or explain one.

    Args:
        name: a mount point or the class of its event, such as after_train_iter or AfterTrainIter.
        imports: a module of yours that declares events.
        json: print JSON: of each mount point what filters count, and the kinds of its fields.
    """
    from trainbus.cli.registered import print_events

    print_events(name, imports or (), as_json=json)
