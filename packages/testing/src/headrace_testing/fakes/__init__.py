"""Fakes that answer as a script says: an engine, pooled vectors, a speech model."""
