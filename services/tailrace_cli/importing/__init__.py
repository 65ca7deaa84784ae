"""Configurations of other systems, converted to our keys: one package of tables for each system."""
