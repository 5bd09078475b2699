"""Many engines as one."""
