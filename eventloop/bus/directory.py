"""The subscriptions of a bus, so that none of them has to be looked for: with thousands, a search for each takes seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any

from trainbus.eventloop.bus.guests import is_same, owner_of
from trainbus.eventloop.bus.redefined import definition_of, redefines
from trainbus.eventloop.bus.subscription import Subscription

_Found = dict[Subscription, None]


class Directory:
    """Subscriptions in the order of dispatch, by mount point, by what ``bus.off`` takes, and by definition.

    Use it under the lock of the bus, which is re-entrant: the handler of a signal may change it in the middle of any method. A
    subscription is in it from the last line of :meth:`add` to the first one of :meth:`discard`, wherever Ctrl-C strikes; the
    indices may name others.
    """

    def __init__(self) -> None:
        self._number = count().__next__
        self._all: dict[Subscription, int] = {}
        self._changes = 0
        self.known: tuple[Subscription, ...] | None = ()
        """What :meth:`ordered` returned, until there is a change."""
        self._names: dict[str, _Found] = {}
        self._owners: dict[Hashable, _Found] = {}
        self._definitions: dict[Hashable, dict[int, _Found]] = {}

    def add(self, one: Subscription) -> None:
        """Add a subscription behind those of its priority."""
        for index, key in self._places(one):
            index.setdefault(key, {})[one] = None
        self._changes += 1
        self.known = None
        self._all[one] = self._number()

    def discard(self, one: Subscription) -> None:
        """Remove a subscription, if it is there."""
        self._all.pop(one, None)
        self._changes += 1
        self.known = None
        for index, key in self._places(one):
            if (found := index.get(key)) is not None:
                found.pop(one, None)
                if not found:
                    del index[key]  # which may keep the handler alive

    def ordered(self) -> tuple[Subscription, ...]:
        """Return all subscriptions by priority, then by registration."""
        while (known := self.known) is None:
            changes = self._changes
            self.known = tuple(self._sorted(list(self._all)))
            if self._changes != changes:  # by the handler of a signal, in between
                self.known = None
        return known

    def copy(self) -> list[Subscription]:
        """Return all subscriptions in no order; needs no lock."""
        return list(self._all)  # one step of C code

    def hearing(self, names: Iterable[str]) -> list[Subscription]:
        """Return the subscriptions to any of these mount points, in the same order."""
        return self._sorted({one for name in names for one in list(self._names.get(name, ())) if one in self._all})

    def of(self, what: object) -> list[Subscription]:
        """Return the subscriptions of a function, a hook or a guest, or one subscription itself."""
        if isinstance(what, Subscription):
            return [what] if what in self._all else []
        keys = _key(what), ("hook", id(owner_of(what)))
        found = {one for key in keys for one in list(self._owners.get(key, ())) if one in self._all}
        return self._sorted(one for one in found if what == one.handler or (one.hook is not None and is_same(one.hook, what)))

    def redefined_by(self, handler: Any) -> list[Subscription]:
        """Return the subscriptions of functions that ``handler`` defines anew."""
        definition = definition_of(handler)
        gone: list[Subscription] = []
        for found in () if definition is None else list(self._definitions.get(definition.name, {}).values()):
            if redefines(handler, next(iter(found)).handler):
                gone += found
        return self._sorted(one for one in gone if one in self._all)

    def _places(self, one: Subscription) -> list[tuple[dict[Any, _Found], Hashable]]:
        """Return the indices that a subscription belongs to, each with its key there."""
        places: list[tuple[dict[Any, _Found], Hashable]] = [(self._names, name) for name in one.mount_points]
        places.append((self._owners, _key(one.handler)))
        if one.hook is not None:
            places.append((self._owners, ("hook", id(owner_of(one.hook)))))
        elif (definition := definition_of(one.handler)) is not None:
            places.append((self._definitions.setdefault(definition.name, {}), id(definition.code)))
        return places

    def _sorted(self, found: Iterable[Subscription]) -> list[Subscription]:
        return sorted(found, key=lambda one: (one.priority, self._all.get(one, 0)))


def _key(handler: Any) -> Hashable:
    try:
        hash(handler)
    except TypeError:
        return id(handler)
    return ("handler", handler)
