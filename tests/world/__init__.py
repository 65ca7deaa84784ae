"""Shared worlds of tests: real servers, services in this process or in their own, scripted models."""
