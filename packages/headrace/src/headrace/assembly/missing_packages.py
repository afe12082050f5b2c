"""Error for a package of headrace that is not installed."""

from __future__ import annotations

from headrace_core.errors import MissingDependency


def missing(error: ImportError) -> MissingDependency:
    return MissingDependency(
        error.name or "headrace-models",
        needed_for="running a model",
        install="pip install 'headrace[all]'",
    )
