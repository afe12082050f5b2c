"""Transcription: text, segments and words of recordings, out of a speech model's completions of clips.

The rules are coroutines that need of an engine the few calls of
:class:`headrace_engine.transcription.calls.EngineCalls`, so that the asynchronous engine
(:mod:`~headrace_engine.transcription.recordings`) and the synchronous API follow the same ones.
"""
