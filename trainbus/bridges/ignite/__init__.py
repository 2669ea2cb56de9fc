"""The bridge to Ignite: its modules are imported when it is used."""
