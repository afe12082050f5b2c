"""The headrace engine: intake, scheduling, execution, sampling, emission, engine clients."""

__version__ = "0.1.0"
