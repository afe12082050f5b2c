"""Listening: how what a model hears in clips becomes text, segments and words of a whole recording.

Torch-free, and of no engine: what is wanted of one is asked in steps (:mod:`headrace_core.listening.asks`),
so that a server and offline calls follow the same rules.
"""
