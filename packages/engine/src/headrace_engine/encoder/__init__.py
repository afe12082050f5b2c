"""An engine that encodes media for others, and others that take their vectors."""
