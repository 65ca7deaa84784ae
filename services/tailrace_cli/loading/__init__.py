"""Checks that load what an experiment names before a run starts, and compare what was found.

`checks` plans the steps and drives child processes; `process` is such a child: it has the environment
of the services, and a step that hangs or ends its process costs that step alone. `model_facts` and
`architecture` read a model, `fitting` compares lengths, sizes and memory (pure), `facts` has the types.
"""
