"""The parts of `bench_learner`."""
