"""Decoders of text with latent attention (MLA), dense or with mixtures of experts."""
