"""Core of the agents service: plays, replays and settles episodes, without bus, Redis or network."""
