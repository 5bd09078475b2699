"""Fast operators, each beside its plain reference."""
