"""``build_report``: one page of HTML about runs, from what they have left in their folders."""

from eventloop.observe.report.history import History
from eventloop.observe.report.page import build_report
from eventloop.observe.report.sentences import Best, verdict

__all__ = ["Best", "History", "build_report", "verdict"]
