"""Fast operators for CPUs (`native/`) and NVIDIA GPUs (`triton/`, `hopper/`), each beside its plain reference."""
