"""Tiny models of many types, and what engine, learner and LoRA do with them (`docs/models.md`)."""
