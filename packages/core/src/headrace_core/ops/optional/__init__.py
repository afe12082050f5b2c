"""Ops that few families need, one module each: its signature and the :class:`OptionalOp` that finds it.

A module is called as its op. The op's definition in plain torch and its fake are in the module of that
name of :mod:`headrace_reference`, the tests that an implementation inherits in that of
:mod:`headrace_testing.ops`. Letters: :mod:`headrace_core.ops`, of recurrences also
:mod:`headrace_core.ops.recurrent`.
"""

import pkgutil

OPTIONAL_OP_NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""Names of the ops that this package knows; an outside package may have others."""
