"""Where a model comes from: a folder, a GGUF file, the hub or the built-in one. Files to values; no torch."""
