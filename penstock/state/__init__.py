"""The state that gateways keep and may share: limits in use, spend, and records such as keys."""
