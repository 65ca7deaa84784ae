"""How scores are made of components, without bus or processes."""
