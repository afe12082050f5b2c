"""Speculative decoding: guesses of next tokens, how many are worth a step's time, and checking them."""
