"""Tenants: who sends a request, what it may use, and what it has spent."""
