"""Writes the final model in Hugging Face's format, and compares it with the training's weights."""
