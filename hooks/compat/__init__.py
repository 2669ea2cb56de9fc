"""Names, options, files and hooks of other systems."""
