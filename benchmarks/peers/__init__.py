"""The systems that `cpu_peers.py` compares, and how each is installed, started and driven."""
