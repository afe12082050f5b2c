"""Metrics, traces and logs of requests."""
