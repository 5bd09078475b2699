"""LoRA adapters as PEFT writes them: read, identified by content, and compared with the model they are for."""
