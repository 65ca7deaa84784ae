"""Word problems with a number as their answer, in several attempts, similar to GSM8K.

`problems` generates problems, `answers` compares answers, `environment` reads data sets and plays
episodes.
"""
