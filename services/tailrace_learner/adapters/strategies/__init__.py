"""Strategies that lay a model and its optimizer over ranks, one per file.

`single` (one process), `fsdp2` (PyTorch's fully sharded data parallel), `deepspeed` (ZeRO; stage 3 is
`zero3`), `megatron` (tensor parallel).
"""
