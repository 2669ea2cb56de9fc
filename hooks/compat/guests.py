"""The hooks of other systems that can be added to a bus, and those that cannot."""

from __future__ import annotations

from eventloop.bus import GuestKind

GUESTS: tuple[GuestKind, ...] = (
    GuestKind("mmengine.hooks.hook.Hook", adapter="hooks.compat.mmengine.guest:MMEngineHook", name="mmengine.hooks.Hook"),
)
"""Each kind, with the adapter that is imported for the first hook of that kind, or the reason for a refusal."""
