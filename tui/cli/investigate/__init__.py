"""Commands that investigate: memory, events, oom, snapshot, stacks, console, report, compare."""
