"""Ranks on further hosts (``--nnodes``): rank 0's process listens, each other host's process joins it.

The hosts prove to each other that they know one secret, compare their settings, and then have a connection
for each rank, over which the frames of :mod:`headrace_engine.multiproc.frames` travel as over the pairs of
sockets of ranks on one host (docs/adr/0137-nodes-join-rank-0.md).
"""
