"""Where reward functions run: processes of their own."""
