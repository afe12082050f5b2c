"""The headrace engine: from prompts to outputs, over a scheduler, workers and engine clients."""

__version__ = "0.1.0"
