"""Limits for work that may go wrong, and faults that are made on purpose."""
