"""ftmon's own trainer: fine-tuning of causal language models with DeepSpeed, from one typed configuration."""
