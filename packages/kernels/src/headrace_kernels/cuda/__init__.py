"""What CUDA devices need beside kernels."""
