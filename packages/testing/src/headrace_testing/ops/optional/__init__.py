"""Suites of ops that few families need, a module each; see :mod:`headrace_core.ops.optional`."""
