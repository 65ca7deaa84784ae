"""Decisions on confinement, without touching the kernel; imports the standard library alone.

The process that runs tool code imports these modules too, so they must load in milliseconds.
"""
