"""The client side of HTTP, for commands, load generators and the keys of token issuers."""
