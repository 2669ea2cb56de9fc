"""``build_report``: build one page of HTML about runs from the files in their folders."""

from eventloop.observe.report.overview import Rules, summaries
from eventloop.observe.report.page import build_report
from eventloop.observe.report.reported_run import ReportedRun
from eventloop.observe.report.sentences import Best, verdict

__all__ = ["Best", "ReportedRun", "Rules", "build_report", "summaries", "verdict"]
