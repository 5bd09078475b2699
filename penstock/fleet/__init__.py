"""Many replicas as one engine.

routing.py        which replica a request goes to: policies as pure functions
snapshot.py       what a router knows of one replica
prefix_index.py   which replica holds how much of a prompt, by what was sent there
versions.py       which version a user gets; which requests are shadowed
cascade.py        whether a small model tries a request, and whether its answer will do
settings.py       the `routing` section of the settings, and that of cascades
"""
