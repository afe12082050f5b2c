"""What the system does with mapped files, which only native code can take in hand."""
