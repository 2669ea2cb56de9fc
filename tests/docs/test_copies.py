"""The button that copies a block of code with the blocks that it goes on from."""

import pytest

pytestmark = [pytest.mark.xdist_group("docs"), pytest.mark.filterwarnings("default::ResourceWarning")]


def test_a_block_is_copied_with_the_blocks_that_it_goes_on_from(site, browser, tmp_path):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto((site / "guides" / "schedules.html").as_uri())
    note = page.locator(".goes-on").last
    note.get_by_role("button", name="Copy with it").click()
    note.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    context.close()
    assert copied.count("import toy_job") == 1
    assert copied.rstrip().endswith("run.report(loss=loss)")
    assert "ReduceLROnPlateau" not in copied  # a block between the two, which the last one does not need
    exec(compile(copied, "copied", "exec"), {"__name__": "copied"})  # noqa: S102 - the text of a page
