"""Weights in fewer bits: int8 and int4 for the native CPU kernels, fp8 for CUDA."""
