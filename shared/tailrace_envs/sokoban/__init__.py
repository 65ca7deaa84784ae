"""Sokoban: solvable levels, text boards, pictures, an expert and a tokenizer.

`board` has the rules, `levels` generates boards, `environment` plays episodes, `expert` makes
demonstrations and baselines; `solver` finds shortest solutions.
"""
