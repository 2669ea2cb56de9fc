"""The bridge to Lightning: its modules are imported when it is used."""
