"""The app that shows a sweep while it runs, and afterwards."""
