"""Whole encoders that families of one shape inherit."""
