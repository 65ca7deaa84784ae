"""Fuzzing of every boundary: `make fuzz`, or `python -m tests.fuzz --help`."""
