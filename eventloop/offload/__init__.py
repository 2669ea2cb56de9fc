"""Run offloaded handlers: one bounded lane per subscription, one consumer per function or hook, a runtime for all."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.eventloop.offload.consumers import Reader, arrive_async
    from trainbus.eventloop.offload.delivery import Delivery, Sources
    from trainbus.eventloop.offload.detach import absent_entry, detacher, from_json, from_msgpack, is_plain, unarrived
    from trainbus.eventloop.offload.drain import Deadline, DrainReport
    from trainbus.eventloop.offload.importable import check_importable
    from trainbus.eventloop.offload.lane import Full, Lane
    from trainbus.eventloop.offload.loops import Backend, HostLoop, in_thread, threadsafe_call
    from trainbus.eventloop.offload.meter import LaneMeter
    from trainbus.eventloop.offload.ordered import HookLanes
    from trainbus.eventloop.offload.runtime import ENDED, Runtime
    from trainbus.eventloop.offload.servers import register_server, server_ends
    from trainbus.eventloop.offload.sized import SizedLane
    from trainbus.eventloop.offload.snapshot import Owned, capture
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ENDED",
    "Backend",
    "Deadline",
    "Delivery",
    "DrainReport",
    "Full",
    "HookLanes",
    "HostLoop",
    "Lane",
    "LaneMeter",
    "Owned",
    "Reader",
    "Runtime",
    "SizedLane",
    "Sources",
    "absent_entry",
    "arrive_async",
    "capture",
    "check_importable",
    "detacher",
    "from_json",
    "from_msgpack",
    "in_thread",
    "is_plain",
    "register_server",
    "server_ends",
    "threadsafe_call",
    "unarrived",
]
