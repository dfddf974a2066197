"""Commands that follow their run in the foreground: plain lines, signals, exit status."""
