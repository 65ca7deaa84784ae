"""Mismatch between inference servers and the learner: measurement, verdicts, quarantine."""
