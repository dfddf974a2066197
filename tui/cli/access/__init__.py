"""Access to runs and recordings for all commands: control, ends, processes of the trainer."""
