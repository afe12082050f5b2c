"""Audio on its way into a model: decoding of uploads, resampling, spectrograms, processors by family,
times of words."""
