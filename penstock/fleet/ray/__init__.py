"""Replicas on a Ray cluster. Ray places workers and reserves what they need; tokens go over the gateway's own sockets.

`launcher.py` is the gateway's side, which never imports Ray. `driver.py` is a process beside the gateway that talks to
the cluster. `host.py` is the Ray actor that runs one worker process on its node.
"""
