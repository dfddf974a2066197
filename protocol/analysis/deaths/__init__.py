"""Death of a process: its cause, judged from its output."""
