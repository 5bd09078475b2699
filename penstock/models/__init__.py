"""The transformer families Penstock runs: their configuration, layers and how checkpoints fill them."""
