"""One episode in the terminal: its model, its tools, its rewards and what is printed of it."""
