"""Loading of a checkpoint's tensors into a model."""
