"""The HTTP side: OpenAI endpoints over any `ServedEngine`, health, metrics, draining."""
