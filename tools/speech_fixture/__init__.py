"""The tiny speech model of the tests: voices, checkpoint and training."""
