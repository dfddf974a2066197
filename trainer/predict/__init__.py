"""Prediction of memory and time by a dry run: the real engine on fake tensors, without a GPU and without weights."""
