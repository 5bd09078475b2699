"""Decisions: which tokens of which sequences to compute next, and where their keys and values live. No torch.

loop.py         schedule, launch, collect the previous step, emit
scheduler.py    what the next step computes; preemption, completion
arrival.py      a request becomes a sequence
pacing.py       how long a step may take, and how much of a prompt fits into it
planned_step.py a step from its planning until its result is there
settings.py     the `engine` section of the settings
limits.py       what a scheduler may use, and which requests could never run
admission.py    whether a promise can be kept, decided on arrival
forecast.py     the arithmetic of that, and how long a step may be
step_time.py    how long a step takes, learnt from the engine's own
calibration.py  the first start on a machine: learnt from requests of our own
peak.py         how large an error may get: the largest of the recent past
urgency.py      who goes first; the queue of those who hold no memory
fairness.py     what each tenant has had
bookkeeping.py  the ledger of every request
sequence.py     one request on its way through the engine
placement.py    rows and blocks that running sequences hold
block_pool.py   paged KV blocks: reference counts, sharing by content hash, eviction
executor.py     the seam to whatever computes a step
local.py        the loop on a thread, as an `Engine`
"""
