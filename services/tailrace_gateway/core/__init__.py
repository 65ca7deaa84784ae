"""What the gateway decides: dialects to messages and back, sessions, budgets. It knows no network."""
