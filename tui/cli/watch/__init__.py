"""Commands that watch a run: attach, ls, status, logs, relay."""
