"""Commands, kills, actions on hangs, and notifications."""
