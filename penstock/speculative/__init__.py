"""Drafters: guesses of how outputs go on, for the engine to verify several tokens in one step."""
