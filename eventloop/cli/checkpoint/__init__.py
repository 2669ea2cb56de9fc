"""``trainbus checkpoint``: look into checkpoints, verify them, and exchange them with other programs."""
