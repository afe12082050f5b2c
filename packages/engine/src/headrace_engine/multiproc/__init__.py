"""Ranks of one engine in processes of their own (``--tensor-parallel-size``, ``--pipeline-parallel-size``).

Rank 0 is the engine's own worker: it has the requests, builds the inputs of each pass of the model and
chooses the tokens. The other ranks hold their shard of the model and of its cache and run the same passes on
the inputs that rank 0 sends them, so nothing that they compute depends on a decision of their own
(docs/adr/0124-rank-0-decides.md). On several stages a pass goes on while rank 0 begins the next one
(docs/adr/0132-a-built-decoder-is-cut-into-stages.md).
"""
