"""``build_report``: build one page of HTML about runs from the files in their folders."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.observe.report.overview import Rules, summaries
    from trainbus.observe.report.page import build_report
    from trainbus.observe.report.reported_run import ReportedRun
    from trainbus.observe.report.sentences import Best, verdict
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Best", "ReportedRun", "Rules", "build_report", "summaries", "verdict"]
