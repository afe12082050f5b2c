"""Blocks of the cache that come from a store outside the pools, and go to one."""
