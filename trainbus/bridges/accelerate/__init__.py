"""The bridge to Accelerate: its modules are imported when it is used."""
