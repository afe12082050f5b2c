"""Answers that take a while: event streams, large JSON, work off the event loop."""
