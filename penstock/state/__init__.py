"""What gateways remember and share: limits in use, spend, and records such as keys."""
