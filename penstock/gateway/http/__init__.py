"""The protocol server: HTTP/1.1 on a socket. It knows nothing of models or tenants."""
