"""Identity of this rank: its facts, and the model that it trains."""
