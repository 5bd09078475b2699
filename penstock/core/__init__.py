"""Plain data shared by every layer: requests, errors, settings and the `Engine` seam. No dependencies."""
