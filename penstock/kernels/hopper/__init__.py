"""Kernels in CUDA C++ for Hopper GPUs (compute capability 9.0) that Triton cannot express; NVRTC compiles them."""
