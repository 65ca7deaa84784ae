"""Our own engine: continuous batching of any Hugging Face causal LM, on the CPU or one CUDA device.

Read in this order: `engine` (one step from end to end), `batch` (rows of running requests as arrays),
`planner` (who computes how much in a step), `kv_cache`, `attention`, `forward` and `lean` (the model),
`sampling`, `stops`, `weights`.
"""
