"""ROLL: its settings, their meaning together, and its defaults."""
