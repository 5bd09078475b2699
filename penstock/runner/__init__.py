"""Tensors: turns a `Step` into one forward pass and sampled tokens.

model_runner.py  the executor: launch, collect
batch.py         a step as tensors
row_state.py     what the device remembers of each running sequence
sampler.py       logits to tokens
memory.py        how many KV blocks fit
"""
