"""Tools that come with Tailrace; `tailrace tools serve tailrace.toolbox.calculator:calculator`."""
