"""Plain data shared by every layer: requests, errors, converted settings and the `Engine` seam. No dependencies."""
