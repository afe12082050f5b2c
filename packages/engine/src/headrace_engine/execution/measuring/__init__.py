"""Cost of steps: bytes at their peak, and seconds."""
