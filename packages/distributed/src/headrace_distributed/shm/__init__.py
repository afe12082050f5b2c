"""Ranks of one host that talk through shared memory: collective operations, and a ring of messages."""
