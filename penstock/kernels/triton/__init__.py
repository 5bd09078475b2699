"""Fast operators for NVIDIA GPUs in Triton, each beside its reference in plain torch."""
