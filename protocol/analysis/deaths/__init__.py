"""Why a process ended: judged from what it printed."""
