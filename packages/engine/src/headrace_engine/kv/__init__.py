"""The paged KV cache's book-keeping: block pool, prefix hashes, layer groups, manager. No torch."""
