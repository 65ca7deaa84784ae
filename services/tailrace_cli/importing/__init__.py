"""Configurations of other systems, read into our keys: one table per system, one file each."""
