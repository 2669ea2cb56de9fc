"""``trainbus checkpoint``: list, show and verify checkpoints, and convert them from and to other formats."""
