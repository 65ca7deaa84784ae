"""How an episode is played, continued, replayed and settled, without bus, Redis or network."""
