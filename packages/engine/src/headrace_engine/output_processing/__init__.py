"""Results on their way out: text from tokens, stop strings, outputs."""
