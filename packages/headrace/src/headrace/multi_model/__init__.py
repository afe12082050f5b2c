"""Several models in one server: entries, their shares of one memory budget, their engines.

==============  =================================================================================
``entries``     ``--models-config``: which models, each with its settings
``budget``      one budget of memory, and what each model may take of it
``loader``      from an entry to an engine, and back to free memory
``serving``     ``headrace serve --models-config FILE``
==============  =================================================================================
"""
