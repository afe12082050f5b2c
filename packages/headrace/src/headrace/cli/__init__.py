"""The ``headrace`` command."""
