"""Checks a configuration against itself, its model, its data and this machine, before anything is started."""
