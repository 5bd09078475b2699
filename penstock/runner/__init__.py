"""Tensors: turns a `Step` into one forward pass and sampled tokens.

model_runner.py  the executor: launch, collect
batch.py         a step as arrays
forward.py       a batch to logits, by plain torch or native kernels
row_state.py     what is remembered of each running sequence
sampler.py       logits to tokens
memory.py        how many KV blocks fit
startup.py       from a model's name to an engine's two halves
"""
