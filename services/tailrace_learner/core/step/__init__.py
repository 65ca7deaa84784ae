"""Learner steps: advantages of a step, passes, updates, metrics, progress of the run."""
