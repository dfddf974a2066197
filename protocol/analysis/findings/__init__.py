"""The type that every detector returns, and the store of alerts."""
