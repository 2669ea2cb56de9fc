"""Write the tables of the saved state in docs/reference/files.md from eventloop/training/schema.py.

python .ci/write_file_formats.py            # write
python .ci/write_file_formats.py --check    # exit 1 if the page is not what would be written
"""

import ast
import inspect
import sys
import typing
from pathlib import Path

from msgspec import Struct

from trainbus.eventloop.training import schema

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "files.md"
BEGIN = "<!-- written by .ci/write_file_formats.py -->\n"
END = "<!-- end -->\n"


def descriptions() -> dict[str, dict[str, str]]:
    """Return the docstring below each field, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            below = zip(node.body, node.body[1:], strict=False)
            found[node.name] = {
                field.target.id: " ".join(text.value.value.split())
                for field, text in below
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
            }
    return found


def rows(cls: type, above: str, known: set[type]) -> list[str]:
    """Return a line for each field of a class, and below it those of its own classes."""
    words = {name: text for base in reversed(cls.__mro__) for name, text in descriptions().get(base.__name__, {}).items()}
    lines = []
    for name, kind in typing.get_type_hints(cls).items():
        lines.append(f"| `{above}{name}` | {words[name]} |")
        arguments = [kind, *typing.get_args(kind)]
        for inner in arguments:
            if isinstance(inner, type) and issubclass(inner, Struct) and inner not in known:
                known.add(inner)
                lines += rows(inner, f"{above}{name}{'[]' if typing.get_origin(kind) is list else ''}.", known)
    return lines


def written() -> str:
    lines = ["| key | content |", "|---|---|", *rows(schema.SavedState, "", set())]
    entry = ", ".join(f"`{name}`" for name in schema.SavedEntry.__struct_fields__)
    lines += ["", f"In another trainer's checkpoint, the entry of the bus has {entry}.", ""]
    lines += [f"This is format {schema.FORMAT}. Files of earlier formats are read. What has changed:", ""]
    lines += [f"- {old} → {old + 1}: {inspect.getdoc(upgrade)}" for old, upgrade in schema.UPGRADES.items()]
    return "\n".join(["", *lines, "", ""])


def page() -> str:
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{written()}{END}{rest.partition(END)[2]}"


def in_sync() -> bool:
    return page() == TARGET.read_text(encoding="utf-8")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if in_sync() else f"{TARGET} is not what the schema says: run python .ci/write_file_formats.py")
    TARGET.write_text(page(), encoding="utf-8")
