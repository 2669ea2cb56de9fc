"""Run offloaded handlers: one bounded lane per subscription, one consumer per function or hook, a runtime for all."""

from eventloop.offload.consumers import Reader, arrive_async
from eventloop.offload.delivery import Delivery, Sources
from eventloop.offload.detach import absent_entry, detacher, from_json, from_msgpack, is_plain, unarrived
from eventloop.offload.drain import Deadline, DrainReport
from eventloop.offload.importable import importable_of
from eventloop.offload.lane import Full, Lane
from eventloop.offload.loops import Backend, HostLoop, in_thread, threadsafe_call
from eventloop.offload.meter import LaneMeter
from eventloop.offload.ordered import HookLanes
from eventloop.offload.runtime import ENDED, Runtime
from eventloop.offload.servers import register_server, server_ends
from eventloop.offload.sized import SizedLane
from eventloop.offload.snapshot import Owned, capture

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
    "detacher",
    "from_json",
    "from_msgpack",
    "importable_of",
    "in_thread",
    "is_plain",
    "register_server",
    "server_ends",
    "threadsafe_call",
    "unarrived",
]
