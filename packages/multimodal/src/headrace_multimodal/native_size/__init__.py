"""Images and videos of models that see them at their own size."""
