"""OpenAI's endpoints: from the bytes of a request to a generation and back."""
