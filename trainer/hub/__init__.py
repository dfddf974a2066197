"""The hub of a run: receives, records and publishes telemetry, and executes commands."""
