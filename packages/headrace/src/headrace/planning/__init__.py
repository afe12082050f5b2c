"""Planning: which layout a model should have on given devices, computed from its config alone.

===============  ===============================================================================
``devices``      ``--devices`` and ``--link`` read; what this machine has
``layouts``      ways to spread a model over devices, and the flags that say them
``parallelism``  how the engine divides layers and experts over stages and ranks
``rank_model``   the model of one rank, built without weights: its bytes, caches and exchanges
``memory``       bytes that a rank needs, by the engine's own reckoning
``decoding``     lower bound of a decode step's time
``advice``       what would make a layout fit, and which layout to take
``plan``         all of it together
``machine``      nodes, cores, and what they read, multiply and wait
``model_shape``  what a step reads, multiplies and starts on a rank
``scaling``      what more threads and nodes are expected to give, by a model with its assumptions listed
===============  ===============================================================================
"""
