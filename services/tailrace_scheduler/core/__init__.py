"""Decisions of the scheduler: events and time go in, decisions come out; nothing here waits or sends."""
