"""`penstock chaos`: breaks the replicas of a running server under load and compares every answer with the right one.

`streams.py` has the requests and what an answer is compared by, `load.py` keeps so many of them in flight, `faults.py`
breaks replicas, `report.py` has the figures, `run.py` puts them together.
"""
