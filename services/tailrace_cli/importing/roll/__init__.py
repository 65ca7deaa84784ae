"""ROLL: its settings, what they mean together, and its defaults."""
