"""The hook of mkdocs: adds generated pages, drawings in the colours of the page, and what a block of code goes on from."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_IMAGE = re.compile(r'(?:<p>\s*)?<img alt="([^"]*)" src="[^"]*?drawings/([\w-]+)\.svg"\s*/?>(?:\s*</p>)?')

_LIST = re.compile(
    r'(<nav class="md-nav" data-md-level="\d" )aria-labelledby="\w+"([^>]*>)'
    r'(\s*<label class="md-nav__title" for="\w+">\s*<span[^>]*></span>\s*)([^<>\n]*[^<>\s])'
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the code and from the results of the benchmarks; in a checkout, some say where to look."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # mkdocs puts back what a hook changes when it is loaded
    import generated

    for path, content in generated.pages().items():
        if (told := files.get_file_from_path(path)) is not None:
            files.remove(told)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Say below blocks of code what they go on from."""
    import continued

    return continued.add_notes(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Replace images of drawings by the drawings themselves."""
    return _IMAGE.sub(lambda found: drawing(found[2], found[1]), html)


def on_post_page(output: str, **_: Any) -> str:
    """Give the theme's search dialog and lists of pages a name, for screen readers."""
    output = _LIST.sub(r'\1aria-label="\4"\2\3\4', output)
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Say on the page of a wrong address where to go."""
    if template_name != "404.html":
        return output_content
    output_content = on_post_page(output_content)
    way = '<p>This page does not exist. Search above, or go to the <a href="/index.html">first page</a>.</p>'
    return output_content.replace("<h1>404 - Not found</h1>", f"<h1>404 - Not found</h1>{way}")


def drawing(name: str, title: str) -> str:
    """Return a drawing as a part of a page, twice: for wide and for narrow screens."""
    from canvas import on_page

    return "".join(on_page(_for_page(f"{name}{form}"), title, form) for form in ("", "-narrow"))


def _for_page(name: str) -> str:
    text = (ROOT / "docs" / "drawings" / f"{name}.svg").read_text(encoding="utf-8")
    # Names of markers are the page's, where several drawings stand beside one another.
    return text.replace('id="arrow', f'id="{name}-arrow').replace("url(#arrow", f"url(#{name}-arrow")
