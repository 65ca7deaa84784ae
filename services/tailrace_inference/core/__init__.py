"""Driving of any engine, independent of the transport."""
