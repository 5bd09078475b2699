"""The answer cache: an `Engine` before another one that stores its answers and replays them.

key.py         what makes two requests the same
answer.py      an answer as it is stored, and its replay
memory.py, redis_tier.py, disk_tier.py (tier.py)   where answers are kept, nearest first
flight.py      single flight: one computation, any number of listeners
engine.py      `CachedEngine`, which puts these together
similar.py, encoder.py   prompts by their meaning, where an operator allows it
settings.py    the `cache` section of the settings
metrics.py     what Prometheus sees of it
"""
