"""``python docs/_site/versions.py FOLDER [TAG ...]``: build the site of this checkout and of tags, with a list to choose from.

Each version gets a folder, named like the tag without its ``v``; that of the checkout is ``latest``. The theme reads
``versions.json``, in mike's format, so the folder needs a web server: ``python -m http.server -d FOLDER``. A tag is built from its own
sources with what is installed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LATEST = "latest"
START = f'<!doctype html><meta charset="utf-8"><title>trainbus</title><meta http-equiv="refresh" content="0; url={LATEST}/index.html">'


def build(sources: Path, folder: Path) -> None:
    """Build the site of a checkout into a folder, with the list of versions in its header."""
    settings = sources / "docs" / "_site" / "versioned.yml"
    settings.write_text("INHERIT: mkdocs.yml\nextra: {version: {provider: mike}}\n", encoding="utf-8")
    try:
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "-f",
            str(settings),
            "--strict",
            "--quiet",
            "-d",
            str(folder.resolve()),
        ]
        subprocess.run(command, check=True, cwd=sources, env={**os.environ, "PYTHONPATH": str(sources)})  # noqa: S603 - of this repository
    finally:
        settings.unlink()


def build_tag(tag: str, folder: Path) -> None:
    """Build the site of a tag from a working tree of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), tag], check=True)  # noqa: S603 - of this repository
        try:
            build(tree, folder)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)  # noqa: S603 - of this repository


def main(folder: Path, tags: list[str]) -> None:
    """Build all versions, the list of them, and a first page that leads to the latest."""
    build(ROOT, folder / LATEST)
    listed = [{"version": LATEST, "title": LATEST, "aliases": []}]
    for tag in tags:
        name = tag.removeprefix("v")
        build_tag(tag, folder / name)
        listed.append({"version": name, "title": name, "aliases": []})
    (folder / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "index.html").write_text(START, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__).partition("\n")[0])
    main(Path(sys.argv[1]), sys.argv[2:])
