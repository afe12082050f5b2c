"""Suites of captured steps: of decoders, encoders, recurrent layers, and steps run in parts."""
