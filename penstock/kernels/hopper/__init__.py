"""Kernels in CUDA C++ for Hopper (compute capability 9.0): what Triton cannot express. NVRTC compiles them."""
