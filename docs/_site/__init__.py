"""What builds the site besides mkdocs: generated pages, drawings, docstrings. None of it is a page."""
