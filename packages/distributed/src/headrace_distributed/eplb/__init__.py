"""Expert parallel load balancing: where the experts of mixtures should be, and how they get there."""
