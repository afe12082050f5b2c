"""GPU kernels in Triton, one op (or family of ops) a module.

Every module has the same parts: a docstring with the formula and its sources, the kernel with
reasons beside its casts, and the host function with the signature of the protocol in
:mod:`headrace_core.ops`. Shape-only versions for compilers are the
reference's (``fake_...`` in :mod:`headrace_reference`).

The tests run these kernels on a CPU through Triton's interpreter (``TRITON_INTERPRET=1``, which
must be set before triton is imported).
"""
