"""Running workers: executors and communicators."""

__version__ = "0.1.0"
