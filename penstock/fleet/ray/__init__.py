"""Replicas and gateways on a Ray cluster. Ray places them and reserves what they need; tokens go over our own sockets.

`launcher.py` (replicas) and `gateways.py` are the gateway's side, which never imports Ray. `driver.py` is a process
beside the gateway that talks to the cluster. `host.py` has the Ray actors that run one process each on their node.
"""
