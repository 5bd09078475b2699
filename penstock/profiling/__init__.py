"""Profiles of a running server: everything that its processes do for some seconds, on one clock."""
