"""Where offloaded handlers run: one bounded lane per subscription, and the runtime that owns their consumers."""

from eventloop.offload.collectives import collectives_allowed, refuses_collectives
from eventloop.offload.consumer import Delivery, Sources, arrive, copied
from eventloop.offload.deadline import Deadline
from eventloop.offload.detach import detach, detacher, from_json, from_msgpack, is_plain
from eventloop.offload.in_thread import in_thread
from eventloop.offload.lane import FULL, Full, Lane
from eventloop.offload.loops import Backend, HostLoop, threadsafe_call
from eventloop.offload.process import ProcessWorker
from eventloop.offload.reports import DrainReport, LaneStats
from eventloop.offload.runtime import Runtime
from eventloop.offload.sized import SizedLane
from eventloop.offload.snapshot import Owned, check_capture
from eventloop.offload.target import target_of
from eventloop.offload.worker import MakeThread, ThreadWorker, Worker

__all__ = [
    "FULL",
    "Backend",
    "Deadline",
    "Delivery",
    "DrainReport",
    "Full",
    "HostLoop",
    "Lane",
    "LaneStats",
    "MakeThread",
    "Owned",
    "ProcessWorker",
    "Runtime",
    "SizedLane",
    "Sources",
    "ThreadWorker",
    "Worker",
    "arrive",
    "check_capture",
    "collectives_allowed",
    "copied",
    "detach",
    "detacher",
    "from_json",
    "from_msgpack",
    "in_thread",
    "is_plain",
    "refuses_collectives",
    "target_of",
    "threadsafe_call",
]
