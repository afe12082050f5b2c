"""Quantized formats that ``headrace quantize`` writes; entry points of ``headrace.weight_encoders``.

Each weight is rounded by itself, to the scales of least squared error; no calibration data is used.
"""
