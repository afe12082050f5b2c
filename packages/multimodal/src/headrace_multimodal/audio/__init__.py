"""Audio: from uploaded files to samples, and from samples to what models hear."""
