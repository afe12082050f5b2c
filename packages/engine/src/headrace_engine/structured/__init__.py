"""Structured output: constraints on the form of a request's output.

Front end: :mod:`admission` makes a constraint of what a request asks for, after it has compiled in
a process that can be killed (:mod:`compile_process`). Core: :mod:`store` compiles it once more, in
a thread beside the steps. Worker: :mod:`matching` follows each request's tokens and masks logits.
"""
