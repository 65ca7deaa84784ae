"""Processes beside tool code: the zygote, its children, and their confinement.

It imports the standard library and `core` alone, since tool code inherits everything that this process
holds. It starts with an empty environment and never sees the data of a call.
"""
