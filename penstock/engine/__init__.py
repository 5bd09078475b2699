"""Decisions: which tokens of which sequences to compute next, and where their keys and values live. No torch.

loop.py      drain inbox, schedule, launch, collect the previous step, emit
scheduler.py what the next step computes; admission, preemption, completion
sequence.py  one request on its way through the engine
block_pool.py  paged KV blocks: reference counts, sharing by content hash, eviction
executor.py  the seam to whatever computes a step
local.py     the loop on a thread, as an `Engine`
"""
