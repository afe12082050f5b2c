"""Suites of attention backends: paged, in both directions, to an encoder."""
