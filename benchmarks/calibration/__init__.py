"""One workload in the simulator and on real services with an engine that computes nothing."""
