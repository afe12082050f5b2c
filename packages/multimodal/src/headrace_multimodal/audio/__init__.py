"""Audio on its way into a model: resampling, spectrograms, processors by family, times of words."""
