"""The pages that no one writes: reference from the code, tables and charts from the results of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import canvas
import command_line
import figures
import hook_options
import log_ids
import migration_table
import moments
import rooms

ROOT = Path(__file__).parents[2]
_LAST = "---\nsearch: {boost: 0.2}\n---\n\n"
"""In a search, guides come before the pages that name everything."""


def pages() -> dict[str, str]:
    """Return the generated pages, and a style sheet, by path within the site."""
    made = {
        "reference/hooks.md": hook_options.page(),
        "reference/mount-points.md": moments.page(),
        "reference/command-line.md": command_line.page(),
        "reference/log-ids.md": log_ids.page(),
        "migrate/hooks.md": migration_table.page(),
        "benchmarks.md": figures.page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "assets/drawings.css": canvas.style_sheet(),
        **rooms.pages(),
    }
    return {path: f"{_LAST}{text}" if path.startswith(("reference/", "changelog")) else text for path, text in made.items()}
