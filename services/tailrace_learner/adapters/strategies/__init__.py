"""Strategies that lay a model and its optimizer over ranks; `base` is that of one process."""
