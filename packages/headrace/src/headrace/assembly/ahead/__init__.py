"""What a start does with weights before torch is imported."""
