"""Sokoban: solvable levels, text boards, pictures, an expert and a tokenizer.

`board` has the rules, `levels` generates boards, `environment` plays episodes; `solver` and `expert`
make demonstrations.
"""
