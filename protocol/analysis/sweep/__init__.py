"""Analysis of sweeps: order of configurations, remaining budget, and results from the rows."""
