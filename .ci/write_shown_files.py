"""Write the files that pages show into their blocks of code: a block below a line ``<!-- file: examples/ppo.py -->``.

So a page can be read anywhere, and shows what the tests run.

python .ci/write_shown_files.py            # write
python .ci/write_shown_files.py --check    # exit 1 if a page is not what would be written
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SHOWN = re.compile(r"^(<!-- file: (\S+) -->\n(?:<!-- .* -->\n)*(```+).*\n)(?:.*\n)*?\3$", re.MULTILINE)


def page(text: str) -> str:
    """Return the text of a page, with the files that it shows as they are now."""
    return _SHOWN.sub(lambda found: found[1] + (ROOT / found[2]).read_text(encoding="utf-8") + found[3], text)


def changed() -> dict[Path, str]:
    """Return the new text of each page that is not what would be written."""
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    return {path: page(text) for path, text in pages.items() if page(text) != text}


if __name__ == "__main__":
    found = changed()
    if "--check" in sys.argv:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in found)
        sys.exit(f"{names}: not the files that are shown: run python .ci/write_shown_files.py" if found else None)
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")
