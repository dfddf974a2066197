"""Access to runs and recordings for all commands: control, end of runs, processes of the trainer."""
