"""Benchmarks: reproducible workloads, a driver for an engine in process, a load generator over HTTP, and reports."""
