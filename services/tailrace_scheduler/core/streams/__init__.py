"""Streaming scheduler: admission, late starts, placement by KV room, ages of groups. Pure.

`StreamCore` takes events (`events.py`) with the time and returns decisions (`decisions.py`). It owns no
clock, bus or network. The service and `tailrace simulate` drive the same class.
"""
