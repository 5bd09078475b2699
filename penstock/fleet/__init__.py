"""The replicas of one model as one engine.

fleet.py      the `Fleet`: an `Engine` that places each request and lets it outlive the replica
replica.py    one replica: launched, watched, launched again
launcher.py   where replicas come from: worker processes here, workers on other machines
journal.py    what is known of one request, enough to go on elsewhere
failover.py   suspects, retry budget, circuit breakers
hedging.py    a second replica where the first token is late
versions.py   which version of a model a user gets; whose requests are shadowed
cascade.py    whether a small model may try, and whether its answer will do
"""
