"""Scheduling: the tokens of requests that the next step computes. No torch."""
