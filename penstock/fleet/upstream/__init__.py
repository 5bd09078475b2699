"""Servers that are not ours as engines: OpenAI-compatible ones, and Triton behind its generate endpoints."""
