"""Speech to text: what a model says of itself, and what transcripts are."""
