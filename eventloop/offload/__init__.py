"""Where offloaded handlers run: one bounded lane per subscription, and the runtime that owns their consumers."""

from eventloop.offload.lane import FULL, Full, Lane
from eventloop.offload.reports import DrainReport, LaneStats
from eventloop.offload.runtime import Runtime

__all__ = ["FULL", "DrainReport", "Full", "Lane", "LaneStats", "Runtime"]
