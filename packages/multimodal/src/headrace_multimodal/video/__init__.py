"""Videos: decoding, sampling of frames, processors."""
