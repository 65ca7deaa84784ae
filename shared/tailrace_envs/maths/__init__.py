"""Word problems with a number as their answer, in several attempts, similar to GSM8K.

`problems` generates problems, `environment` reads data sets, compares answers and plays episodes.
"""
