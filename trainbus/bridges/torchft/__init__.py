"""The bridge to torchft: its modules are imported when it is used."""
