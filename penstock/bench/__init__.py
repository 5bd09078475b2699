"""Measuring: workloads that are a function of a seed, an engine driver, a load generator, reports beside targets."""
