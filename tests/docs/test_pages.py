"""What a reader finds on each page: the order of the site, drawings and snippets before prose."""

import re
import tomllib

import pytest

from .pages import DOCS, ROOT, blocks, pages

NAVIGATION = [
    "Home",
    "Start",
    "Concepts",
    "Guides",
    "Help",
    "Engines",
    "Migrate",
    "Reference",
    "Internals",
    "Benchmarks",
    "Changelog",
]
CONCEPTS = sorted(path.name for path in (DOCS / "concepts").glob("*.md") if path.stem != "index")
GUIDES = sorted(path.name for path in (DOCS / "guides").glob("*.md") if path.stem != "index")


def head(path):
    """The text of a page before its first section, without code."""
    return re.split(r"^## ", path.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]


def runs_in_head(page):
    """Whether Python is run before the first section of a page."""
    end = head(DOCS / page).count("\n") + 1
    return any(
        block.language == "python" and "shown" not in block.marks for block in blocks(f"docs/{page}") if block.line < end
    )


def test_the_site_is_in_the_order_in_which_one_learns():
    settings = (DOCS / "_site" / "mkdocs.yml").read_text(encoding="utf-8")
    nav = settings.partition("\nnav:\n")[2]
    assert re.findall(r"^  - (\w+):", nav, re.MULTILINE) == NAVIGATION


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_has_a_drawing_and_code_that_runs_before_its_first_section(name):
    assert "](../drawings/" in head(DOCS / "concepts" / name)
    assert runs_in_head(f"concepts/{name}")


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_has_code_before_its_first_section(name):
    found = blocks(f"docs/guides/{name}")
    end = head(DOCS / "guides" / name).count("\n") + 1
    assert any(block.line < end and block.language in ("python", "toml") for block in found)


def test_the_page_of_the_installation_has_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    assert not [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in text]


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md", "benchmarks/README.md"])
def test_links_lead_to_files_of_the_checkout(page):
    """The site is another way to read the pages: on it, some of these files are made from the code."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r'\]\(([^)\s#]+)[^)]*\)|(?:src|srcset|href)="([^"#]+)', text)
    links = {link for found in targets for link in found if link and "://" not in link}
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def test_a_block_that_shows_a_file_has_its_text():
    shown = [block for page in pages() for block in blocks(page) if "file" in block.marks]
    assert len(shown) > 10
    assert not [block.page for block in shown if block.code != (ROOT / block.marks["file"]).read_text(encoding="utf-8")]


@pytest.mark.parametrize("folder", ["concepts", "guides", "engines", "migrate", "internals"])
def test_the_index_of_a_part_links_all_of_its_pages(folder):
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / folder / "index.md").read_text(encoding="utf-8")))
    pages = {path.name for path in (DOCS / folder).glob("*.md")} - {"index.md"}
    assert pages <= links


def test_the_figures_of_the_comparison_are_those_of_the_benchmarks():
    measured = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("## Figures")[2]
    quoted = re.findall(r"\d[\d,.]*(?= ?(?:ns|µs|ms|%))", (DOCS / "start" / "when.md").read_text(encoding="utf-8"))
    assert len(quoted) > 15
    assert not [one for one in quoted if one not in ("10", "1", "5") and one not in measured]
