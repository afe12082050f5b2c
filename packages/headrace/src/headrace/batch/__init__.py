"""Batch files: JSON lines of requests in, JSON lines of answers out (``headrace run-batch``)."""
