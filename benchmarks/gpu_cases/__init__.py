"""The benchmark cases of `gpu_kernels.py`, by kind of kernel."""
