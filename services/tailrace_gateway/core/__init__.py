"""Decisions of the gateway without network I/O: dialects, sessions, calls, token budgets."""
