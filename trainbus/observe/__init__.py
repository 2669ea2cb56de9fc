"""Measure a run and read the files it left: environment, record, scalars, costs."""

from trainbus.eventloop.bus.recording import register_recorder
from trainbus.eventloop.checks import options_of
from trainbus.eventloop.plain import encodable, plain, plain_config, without_secrets
from trainbus.observe.bus_recorder import BusRecorder, Call, LaneSpan
from trainbus.observe.costs import Costs, Growth, Histogram, LaneCosts, Part
from trainbus.observe.environment import Environment, environment
from trainbus.observe.media import MEDIA, PICTURES, AnyReported, Reported, ReportedHistogram, ReportedImage, ReportedText
from trainbus.observe.ranks import RankCosts, RankTimes, Straggler, slow_at
from trainbus.observe.record import Begin, Compared, End, Entry, Measured, Resume, Stage, entry_of, fields_of
from trainbus.observe.run_folder import (
    MANIFEST,
    RECORD,
    SCALARS,
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
from trainbus.observe.sparkline import Sparkline, last_lines, main_curve
from trainbus.observe.states import RunStatus
from trainbus.observe.story import RunManifest, RunSession, RunStory
from trainbus.observe.trace import Tracer
from trainbus.observe.verdict import expensive

__all__ = [
    "MANIFEST",
    "MEDIA",
    "PICTURES",
    "RECORD",
    "SCALARS",
    "AnyReported",
    "Begin",
    "BusRecorder",
    "Call",
    "Compared",
    "Costs",
    "Damage",
    "End",
    "Entry",
    "Environment",
    "Growth",
    "Histogram",
    "LaneCosts",
    "LaneSpan",
    "Measured",
    "Part",
    "RankCosts",
    "RankTimes",
    "Reported",
    "ReportedHistogram",
    "ReportedImage",
    "ReportedText",
    "Resume",
    "RunDamagedError",
    "RunFolder",
    "RunFolderError",
    "RunManifest",
    "RunSession",
    "RunStatus",
    "RunStory",
    "Sparkline",
    "Stage",
    "Straggler",
    "Tracer",
    "encodable",
    "encode_line",
    "entry_of",
    "environment",
    "expensive",
    "fields_of",
    "find_runs",
    "is_run",
    "last_lines",
    "main_curve",
    "options_of",
    "plain",
    "plain_config",
    "read_manifest",
    "slow_at",
    "without_secrets",
    "write_manifest",
]

register_recorder("trainbus.observe:BusRecorder")
