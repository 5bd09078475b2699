"""What an operator sees: metrics, logs, traces, and where the time of every request went."""
