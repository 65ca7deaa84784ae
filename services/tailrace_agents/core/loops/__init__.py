"""How agent loops are played: their policy, their tools, their journal, their end."""
