"""Adapters (LoRA) as clients see them: names beside the model's own, loaded, unloaded and looked for."""
