"""The HTTP side of serving: OpenAI's endpoints over any `ServedEngine`, tenants and their limits, metrics, draining."""
