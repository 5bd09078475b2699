"""What `gpu_kernels.py` measures, by kind of kernel."""
