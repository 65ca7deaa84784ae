"""What is allowed, decided without touching the kernel; the standard library alone is imported here.

The process that runs tool code imports these modules too, so they must load in milliseconds.
"""
