"""The replicas of one model as one engine.

fleet.py          the `Fleet`: an `Engine` that places each request and lets it outlive the replica
replica.py        one replica: launched, watched, launched again
launcher.py       where replicas come from: worker processes here, workers on other machines
discovery.py      workers behind a DNS name: one replica for each of its addresses
upstream/         other servers as replicas
build.py          from the settings of a model to its launchers
journal.py        what is known of one request, enough to go on elsewhere
failover.py       suspects, retry budget, circuit breakers
hedging.py        a second replica where the first token is late
router.py         keeps what the choice of a replica needs
routing.py        which replica a request goes to: policies as pure functions
snapshot.py       what a router knows of one replica
prefix_index.py   which replica holds how much of a prompt, by what was sent there
versions.py       which version a user gets; which requests are shadowed
cascade.py        whether a small model tries a request, and whether its answer will do
control.py        what an administrator does with a running fleet
shared.py         one fleet for several gateway processes, over a channel.py between them
gateways.py       where gateway processes come from
ray/              replicas and gateways on a Ray cluster
metrics.py        of replicas, for Prometheus; stats.py adds up their readings
settings.py       the fleet's sections of the settings
"""
