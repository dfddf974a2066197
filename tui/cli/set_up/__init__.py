"""Commands that set up: doctor and completion."""
