"""The bridge to Hugging Face's Trainer: its modules are imported when it is used."""
