"""What `clients.py` tries with each client."""
