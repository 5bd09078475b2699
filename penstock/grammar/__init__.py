"""Structured output: what a request's output must match, compiled and followed by llguidance."""
