"""Models that turn speech into text."""
