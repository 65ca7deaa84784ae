"""Configurations of other systems, read into our keys: a package for each system."""
