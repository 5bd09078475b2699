"""The process around an engine: an engine loop must never share a GIL with an HTTP server.

protocol.py   what crosses the socket: length-prefixed MessagePack, nothing that executes
server.py     the worker's side: one engine, one gateway
main.py       the worker process
client.py     the gateway's side, an `Engine`
supervisor.py starts the process, notices that it died or froze, starts it again
"""
