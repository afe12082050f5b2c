"""Ways to reach an engine core: in this process, or in another."""
