"""The model and its tokenizer: loading, adapters, attention and loss."""
