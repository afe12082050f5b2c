"""All-reduce by kernels of our own, over memory that every rank's GPU has mapped."""
