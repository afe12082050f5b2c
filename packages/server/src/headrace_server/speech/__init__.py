"""Speech to text over HTTP: forms to recordings, transcripts to the answers asked for."""
