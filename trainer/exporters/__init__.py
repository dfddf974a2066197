"""Exporters of a live run to other systems; each is a process beside the hub that reads its stream as an app does."""
