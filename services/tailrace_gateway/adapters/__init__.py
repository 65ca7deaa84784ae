"""Adapters of the gateway: its HTTP server and routes."""
