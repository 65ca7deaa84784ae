"""Discrete-event simulation of a run: the scheduler's core, simulated engines, learner and workload."""
