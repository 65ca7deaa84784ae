"""Adapters for unchanged published environments: gymnasium, verifiers and OpenEnv servers."""
