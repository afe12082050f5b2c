"""One engine, several processes that run the same script (torchrun): each gets its outputs.

Rank 0's process has the engine. Each of the others prepares the same requests, compares them with rank 0's,
and takes the outputs of rank 0's engine as those of its own (docs/adr/0138-launched-ranks-mirror-rank-0.md).
"""
