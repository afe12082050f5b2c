"""Implementations of headrace-core's ops: ``cpu`` (native C++) and ``triton`` (GPU).

Importing this package imports no torch. Nothing here is called by name: the providers register
under the entry-point group ``headrace.kernels`` and :func:`headrace_core.ops.bind_ops` picks.
"""

__version__ = "0.1.0"
