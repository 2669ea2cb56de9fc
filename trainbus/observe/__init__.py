"""Measure a run and read the files it left: environment, record, scalars, costs."""

from typing import TYPE_CHECKING

from trainbus.eventloop.bus.recording import register_recorder
from trainbus.eventloop.lazy import lazy
from trainbus.observe.environment import Environment, environment

if TYPE_CHECKING:
    from trainbus.observe.alerts import Alert, AlertHook
    from trainbus.observe.bus_recorder import BusRecorder, Call, LaneSpan
    from trainbus.observe.costs import Costs, Durations, Growth, LaneCosts, Part
    from trainbus.observe.dashboard.hook import Dashboard
    from trainbus.observe.entries import entry_of
    from trainbus.observe.ranks import RankCosts, RankTimes, Straggler, slow_at
    from trainbus.observe.record import Begin, Compared, End, Entry, Measured, Resume, Stage, fields_of
    from trainbus.observe.run_folder import (
        MANIFEST,
        RECORD,
        Damage,
        RunDamagedError,
        RunFolder,
        RunFolderError,
        encode_line,
        find_runs,
        is_run,
        read_manifest,
        write_manifest,
    )
    from trainbus.observe.run_record import RunRecordHook
    from trainbus.observe.sparkline import Sparkline, last_lines, main_curve
    from trainbus.observe.states import RunStatus
    from trainbus.observe.story import RunManifest, RunSession, RunStory
    from trainbus.observe.trace import Tracer
    from trainbus.observe.trace.hook import TraceHook
    from trainbus.observe.verdict import expensive
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "MANIFEST",
    "RECORD",
    "Alert",
    "AlertHook",
    "Begin",
    "BusRecorder",
    "Call",
    "Compared",
    "Costs",
    "Damage",
    "Dashboard",
    "Durations",
    "End",
    "Entry",
    "Environment",
    "Growth",
    "LaneCosts",
    "LaneSpan",
    "Measured",
    "Part",
    "RankCosts",
    "RankTimes",
    "Resume",
    "RunDamagedError",
    "RunFolder",
    "RunFolderError",
    "RunManifest",
    "RunRecordHook",
    "RunSession",
    "RunStatus",
    "RunStory",
    "Sparkline",
    "Stage",
    "Straggler",
    "TraceHook",
    "Tracer",
    "encode_line",
    "entry_of",
    "environment",
    "expensive",
    "fields_of",
    "find_runs",
    "is_run",
    "last_lines",
    "main_curve",
    "read_manifest",
    "slow_at",
    "write_manifest",
]

register_recorder("trainbus.observe:BusRecorder")
