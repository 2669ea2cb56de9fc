"""The state of the hooks of a bus, by their names, as checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eventloop.bus.hook import Hook
from eventloop.errors import SubscribeError
from eventloop.log import get_logger

log = get_logger()


def check_names(hooks: Sequence[Hook]) -> None:
    """Raise SubscribeError if a hook is among ``hooks`` twice, or two with state have one name."""
    for index, hook in enumerate(hooks):
        for other in hooks[:index]:
            if hook is other:
                raise SubscribeError(f"{hook.label} is on this bus already")
            if hook.stateful and other.stateful and hook.label == other.label:
                raise SubscribeError(
                    f"two hooks with state are named {hook.label!r}, and a checkpoint keeps state by name; "
                    f"give one of them another `name`"
                )


def state_of(hooks: Iterable[Hook]) -> dict[str, Any]:
    """Return the state of all hooks that have any, by name."""
    return {hook.label: hook.state_dict() for hook in hooks if hook.stateful}


def load_state(hooks: Iterable[Hook], state: Mapping[str, Any]) -> None:
    """Give every hook its state back. What is missing on either side stays as it is, with a warning."""
    saved = dict(state)
    for hook in hooks:
        if hook.stateful and hook.label not in saved:
            log.warning("the checkpoint has no state for this hook; it starts afresh", hook=hook.label)
        elif hook.stateful:
            hook.load_state_dict(saved.pop(hook.label))
    if saved:
        log.warning("the checkpoint has state of hooks that are not on the bus", hooks=sorted(saved))
