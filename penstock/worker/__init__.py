"""The process around an engine: an engine loop must never share a GIL with an HTTP server.

protocol.py   what crosses the sockets: length-prefixed MessagePack, nothing that executes
server.py     the worker's side: one engine, its gateways
control.py    gateways that come over a launcher's socket
remote.py     gateways that come over a network, with a secret
main.py       the worker process
client.py     the gateway's side, an `Engine`
"""
