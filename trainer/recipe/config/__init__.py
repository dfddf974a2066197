"""The trainer's configuration: read, checked, resolved for this machine and written. Nothing here imports torch."""
