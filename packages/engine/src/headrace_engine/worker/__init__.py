"""Workers: what they are told when they are made, and the one that serves.

=============  ==================================================================================
``settings``   everything that a worker is told, in parts by idea; imports no torch
``serving``    the worker that owns a model, its cache and its requests on one device
``recording``  how its steps are recorded, on rank 0 as on those that follow
``guessing``   who guesses tokens that its steps check besides
=============  ==================================================================================

Workers whose weights may change are :mod:`headrace_engine.weights.worker`, those of ranks that follow
:mod:`headrace_engine.multiproc.following`.
"""
