"""From bodies on the wire to what the engine takes."""
