"""Word problems with a number as their answer, in several attempts, in the manner of GSM8K.

`problems` makes problems, `source` chooses between them and a data set, `answers` compares numbers,
`environment` is the episode.
"""
