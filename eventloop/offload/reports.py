"""What lanes have counted, and what drains say of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class LaneStats(msgspec.Struct, frozen=True):
    """Counts of one lane: ``published == delivered + failed + dropped + pending``."""

    published: int = 0
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0


class DrainReport(msgspec.Struct, frozen=True):
    """What a drain found once it was over, summed over lanes."""

    delivered: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0


def since(before: LaneStats, now: LaneStats) -> DrainReport:
    """Return what a lane has counted since ``before``, and what is pending now."""
    return DrainReport(
        delivered=now.delivered - before.delivered,
        dropped=now.dropped - before.dropped,
        failed=now.failed - before.failed,
        pending=now.pending,
    )


def total(reports: Iterable[DrainReport]) -> DrainReport:
    """Return the sum of reports."""
    each = list(reports)
    return DrainReport(
        delivered=sum(report.delivered for report in each),
        dropped=sum(report.dropped for report in each),
        failed=sum(report.failed for report in each),
        pending=sum(report.pending for report in each),
    )
