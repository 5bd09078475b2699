"""Stand-ins for the parts of an engine that need a model or time, to test everything around them.

scripted_engine.py  an `Engine` that answers from a script: for what stands before engines, as a gateway or a router
virtual_engine.py   the real loop and scheduler on a virtual clock: an hour of load passes in seconds, always the same
virtual_fleet.py    several of them on one timeline: for what chooses among engines
paged_executor.py   an `Executor` that stores token ids where a model has keys and values: notices misuse of the cache
clock.py            the virtual clock
"""
