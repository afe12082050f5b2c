"""Model families, their shared layers, and how checkpoints become models.

:func:`headrace_models.resolve.resolve` reads a checkpoint's facts without torch;
:func:`headrace_models.loading.loader.load_model` builds the model and fills it.
"""
