"""Fast operators and whole models for CPUs: a C++ library behind a C ABI, and the Python that calls it."""
