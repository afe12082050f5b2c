"""Low-rank adapters of a model's layers (LoRA): files, names, and the slots that a step chooses from."""
