"""What runs beside tool code: the zygote, what it forks, and what confines that.

Only the standard library and `core` are imported here, since whatever this process knows, the tool code
that it forks knows as well. It starts with an empty environment and never sees the data of a call.
"""
