"""Sokoban: solvable levels by reverse play, text boards, pictures, an expert and a tokenizer.

`environment` is the game as the model sees it, `board` its rules, `levels` where boards come from,
`solver` and `expert` what demonstrations need.
"""
