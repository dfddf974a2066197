"""The final model in Hugging Face's format, compared with the training's weights before it counts as written."""
