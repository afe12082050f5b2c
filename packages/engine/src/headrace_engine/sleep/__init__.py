"""Sleep: an engine that gives its memory back and takes it again."""
