"""Where offloaded handlers run: one bounded lane per subscription, and the runtime that owns their consumers."""

from eventloop.offload.lane import FULL, Full, Lane
from eventloop.offload.reports import DrainReport, LaneStats
from eventloop.offload.runtime import Runtime
from eventloop.offload.snapshot import Owned, detach, from_json, from_msgpack

__all__ = ["FULL", "DrainReport", "Full", "Lane", "LaneStats", "Owned", "Runtime", "detach", "from_json", "from_msgpack"]
