"""Format figures for tables and charts."""

from benchmarks.harness import Comparison

UNITS = {"ns": 1e9, "µs": 1e6, "ms": 1e3}


def goal(comparison: Comparison) -> str:
    """Format the goal for the subject's figure, as a multiple of the floor or in the comparison's unit."""
    budget = comparison.budget
    if budget.seconds is not None:
        return f"{amount(budget.seconds, comparison.unit)} {comparison.unit}"
    return f"{budget.limit:.2f}"


def amount(seconds: float, unit: str) -> str:
    value = seconds * UNITS[unit]
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"
