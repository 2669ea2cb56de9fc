"""The bridge to torchtitan: its modules are imported when it is used."""
