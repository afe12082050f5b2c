"""The message format of the gpt-oss models ("Harmony"), as OpenAI published it.

Messages have a role, a channel (``analysis``, ``commentary``, ``final``) and maybe a recipient;
calls are messages to a recipient. Source: the format's guide,
https://cookbook.openai.com/articles/openai-harmony.
"""
