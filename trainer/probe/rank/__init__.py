"""Who this rank is: what it knows of itself, and what it trains."""
