"""Alerts, causes, log lines, the summary and the replay bar as lines."""
