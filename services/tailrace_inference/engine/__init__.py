"""Torch engine: continuous batching of any Hugging Face causal LM, on the CPU or one CUDA device.

Reading order: `engine` (one step from end to end), `batch` (running requests as rows of arrays),
`planner` (tokens of each request in a step), `kv_residency`, `kv_cache`, `attention`, `forward` and
`llama_forward` (the model), `sampling`, `stops`, `weights`.
"""
