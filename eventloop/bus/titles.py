"""How tables name the handler of a hook."""

from __future__ import annotations

from collections.abc import Collection


def without_method(name: str, mount_points: Collection[str]) -> str:
    """Return the name of a hook's handler without its method, if the method has the name of one of its mount points."""
    hook, _, method = name.rpartition(".")
    return hook if hook and method in mount_points else name


def title(name: str, mount_point: str) -> str:
    """Return the title of a handler at a mount point, without repetition: ``"EMAHook, after_train_iter"``."""
    return f"{without_method(name, [mount_point])}, {mount_point}"
