"""Decisions of the scheduler: events and time in, decisions out; nothing here waits or sends."""
