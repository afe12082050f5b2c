"""Speech models: their class, what it says of a checkpoint, and what an engine offers of it."""
