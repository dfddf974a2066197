"""A command that follows its run in the foreground: plain lines, signals, exit status."""
