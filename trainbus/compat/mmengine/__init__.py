"""MMEngine: the names and options of its hooks, its checkpoints, and its hooks as guests (``guest``)."""
