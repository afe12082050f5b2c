"""The simulated device: everything of headrace but the model, over tokens that can be predicted.

Imports no torch. See ``docs/sim.md``.
"""
