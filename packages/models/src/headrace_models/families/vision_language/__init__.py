"""The text parts of models that also see."""
