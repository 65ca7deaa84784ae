"""Built-in tools; `tailrace tools serve tailrace.toolbox.calculator:calculator`."""
