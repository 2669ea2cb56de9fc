"""Test your own hooks, writers and bridges: a small job, what a bus publishes, a simulated device, and our own checks.

Nothing here is imported before it is used. Only the checks need pytest, whose tests they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainbus.testing.device import DeviceUnderTest, simulated_device
    from trainbus.testing.events import capture_events
    from trainbus.testing.host_checks import HostChecks
    from trainbus.testing.host_job import HostJob
    from trainbus.testing.toy import step, toy_job
    from trainbus.testing.writer_checks import WriterChecks

_HOMES = {
    "DeviceUnderTest": "device",
    "HostChecks": "host_checks",
    "HostJob": "host_job",
    "WriterChecks": "writer_checks",
    "capture_events": "events",
    "simulated_device": "device",
    "step": "toy",
    "toy_job": "toy",
}

__all__ = ["DeviceUnderTest", "HostChecks", "HostJob", "WriterChecks", "capture_events", "simulated_device", "step", "toy_job"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOMES[name]}"
    if name.endswith("Checks"):
        import_module("pytest").register_assert_rewrite(home)  # an assertion that fails shows its values
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
