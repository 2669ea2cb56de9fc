"""trainbus."""
