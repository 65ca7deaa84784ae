"""Decides which versions are held and which offers are repetitions, without bytes or bus."""
