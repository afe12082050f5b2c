"""Objects in memory that processes share: one process writes, others read."""
