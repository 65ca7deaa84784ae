"""The agents service: plays queued episodes, thousands at once, and settles them."""
