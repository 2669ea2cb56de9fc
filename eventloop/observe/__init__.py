"""Measure a run and read the files it left: environment, record, scalars, costs."""

from eventloop.observe.bus_recorder import BusRecorder, Call, LaneSpan
from eventloop.observe.costs import Costs, Growth, Histogram, LaneCosts, Part
from eventloop.observe.environment import Environment, environment
from eventloop.observe.last_lines import last_lines
from eventloop.observe.ranks import RankCosts, RankTimes, Straggler
from eventloop.observe.run_folder import (
    FACTS,
    RECORD,
    SCALARS,
    Damage,
    RunDamagedError,
    RunFacts,
    RunFolder,
    RunFolderError,
    Session,
    encode_line,
    find_runs,
    is_run,
    read_facts,
    write_facts,
)
from eventloop.observe.sparkline import Sparkline, main_curve
from eventloop.observe.story import RunState
from eventloop.observe.trace import Tracer
from eventloop.observe.verdict import expensive

__all__ = [
    "FACTS",
    "RECORD",
    "SCALARS",
    "BusRecorder",
    "Call",
    "Costs",
    "Damage",
    "Environment",
    "Growth",
    "Histogram",
    "LaneCosts",
    "LaneSpan",
    "Part",
    "RankCosts",
    "RankTimes",
    "RunDamagedError",
    "RunFacts",
    "RunFolder",
    "RunFolderError",
    "RunState",
    "Session",
    "Sparkline",
    "Straggler",
    "Tracer",
    "encode_line",
    "environment",
    "expensive",
    "find_runs",
    "is_run",
    "last_lines",
    "main_curve",
    "read_facts",
    "write_facts",
]
