"""A canvas for the site's drawings: boxes, arrows and text in one set of colours, light and dark."""

from __future__ import annotations

import re
from html import escape

LIGHT = {
    "ground": "#f5f7fa", "edge": "#cbd2d9", "paper": "#ffffff", "ink": "#1f2933", "dim": "#52606d",
    "green": "#2f8f4e", "green-fill": "#e3f8e8", "blue": "#2563c9", "blue-fill": "#e6f0ff",
    "red": "#b42318", "red-fill": "#fdecea", "amber": "#8a5a00", "amber-fill": "#fff4d6",
}  # fmt: skip
DARK = {
    "ground": "#1a2230", "edge": "#3b4757", "paper": "#232c3b", "ink": "#e6ebf2", "dim": "#a7b3c2",
    "green": "#6fd08c", "green-fill": "#17351f", "blue": "#8ab4ff", "blue-fill": "#182c4d",
    "red": "#ff9d94", "red-fill": "#3f1c1a", "amber": "#f0c264", "amber-fill": "#3a2c0c",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


def style_sheet() -> str:
    """Return the colours of the drawings on a page, which follow its switch between light and dark."""
    schemes = {"default": LIGHT, "slate": DARK}
    return "".join(f'[data-md-color-scheme="{name}"] svg.drawing{{{_variables(schemes[name])}}}\n' for name in schemes)


SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


class Canvas:
    """One drawing. Coordinates are in pixels of its full size; kinds are names of colours."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        self._heads: dict[str, None] = {}

    def panel(
        self, x: float, y: float, width: float, height: float, title: str = "", *, kind: str = "edge", note: str = ""
    ) -> None:
        """Draw an area that holds other things, its title in the upper left corner and a note in the upper right one."""
        self.rect(x, y, width, height, 10, "ground", kind)
        if title:
            self.text(x + 12, y + 21, title, size=13, bold=True, kind="dim" if kind == "edge" else kind)
        if note:
            self.text(x + width - 12, y + 21, note, size=12, anchor="end", kind="dim")

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "", mono: bool = False) -> None:
        """Draw a box with lines of text, the first one bold."""
        self.rect(x, y, width, height, 7, f"{kind}-fill" if kind else "paper", kind or "dim")
        top = y + height / 2 - (len(lines) - 1) * 9 + 5
        for number, line in enumerate(lines):
            first = number == 0
            self.text(
                x + width / 2, top + number * 18, line,
                size=13 if first else 12, bold=first, mono=mono and first, anchor="middle", kind="ink" if first else "dim",
            )  # fmt: skip

    def text(
        self, x: float, y: float, text: str, *,
        size: int = 12, bold: bool = False, mono: bool = False, anchor: str = "start", kind: str = "ink",
    ) -> None:  # fmt: skip
        """Write a line of text; ``y`` is its baseline."""
        font = MONO if mono else SANS
        weight = ' font-weight="600"' if bold else ""
        attributes = f'x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}"{weight} text-anchor="{anchor}"'
        self._parts.append(f'<text {attributes} style="fill:var(--{kind})">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], kind: str = "dim", dashed: bool = False, head: bool = True) -> None:
        """Draw a line through points, with an arrowhead at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        more = ' stroke-dasharray="5 4"' if dashed else ""
        if head:
            self._heads[kind] = None
            more += f' marker-end="url(#arrow-{kind})"'
        self._parts.append(f'<polyline points="{path}" fill="none" stroke-width="1.7"{more} style="stroke:var(--{kind})"/>')

    def slots(self, x: float, y: float, count: int, *, filled: int, kind: str = "blue", size: int = 18) -> None:
        """Draw the slots of a queue, the first ones filled."""
        for number in range(count):
            fill = f"{kind}-fill" if number < filled else "paper"
            self.rect(x + number * (size + 4), y, size, size, 3, fill, kind)

    def rect(self, x: float, y: float, width: float, height: float, radius: int, fill: str, stroke: str) -> None:
        """Draw a rectangle with rounded corners."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
        self._parts.append(f'<rect {size} stroke-width="1.4" style="fill:var(--{fill});stroke:var(--{stroke})"/>')

    def svg(self) -> str:
        """Return the drawing as a file of its own, which follows the system's colours."""
        style = f"svg{{{_variables(LIGHT)}}}@media (prefers-color-scheme:dark){{svg{{{_variables(DARK)}}}}}"
        heads = "".join(
            f'<marker id="arrow-{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 10 5 0 10z" style="fill:var(--{kind})"/></marker>'
            for kind in self._heads
        )
        size = f'viewBox="0 0 {self.width} {self.height}"'
        first = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        ground = '<rect width="100%" height="100%" style="fill:var(--paper)" class="ground"/>'
        return "\n".join([first, f"<style>{style}</style>", f"<defs>{heads}</defs>", ground, *self._parts, "</svg>", ""])


def on_page(svg: str, title: str, form: str = "") -> str:
    """Return a drawing as a part of a page, in the page's colours. ``form`` is "" for wide screens, "-narrow" for others."""
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg class="drawing" aria-label="{title}" ', 1)
    searched = " data-search-exclude" if form else ""  # the words are the same
    return f'<div class="drawing-box{form}"{searched}>{svg}</div>'
