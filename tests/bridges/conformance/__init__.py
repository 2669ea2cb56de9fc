"""One small training for each host; ``test_conformance.py`` runs, stops, breaks and resumes them all in the same way."""
