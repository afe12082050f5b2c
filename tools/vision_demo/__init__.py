"""The vision demo model's training: pictures, questions about them, the network, the checkpoint."""
