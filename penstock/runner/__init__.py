"""Executors: they compute a step that the engine has scheduled, as one forward pass and sampled tokens.

native_runner.py the executor on the CPU, without torch: launch, collect
model_runner.py  the executor in plain torch; forward.py is its part that runs the model
cuda_runner.py   the executor on a GPU, by CUDA graphs; fused_forward.py is its part that runs the model, mixed_steps.py
                 has the graphs of steps with prompts
encoder_runner.py  the executor of encoders; pooled_runner.py that of decoders for embeddings
batch.py         a step as arrays
rows.py          what is remembered of each running sequence; host_rows.py adds what the native sampler needs,
                 row_state.py what a device needs
sampler.py       logits to tokens, in torch
scoring.py       who asks for log-probabilities
packed.py        weights quantised and packed for the native kernels
memory.py        how many KV blocks fit
startup.py       from a model's name to an engine's two halves; encoder_startup.py for encoders
"""
