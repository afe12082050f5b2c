"""GGUF files: one or several, with weights in blocks, and in their metadata config and tokenizer.

Source: the format document of ggml, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
