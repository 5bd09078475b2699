"""Files, batches and the durable queue of their lines (docs/batches.md)."""
