"""The files of a checkpoint: where they come from, and that they are what they should be. No torch."""
