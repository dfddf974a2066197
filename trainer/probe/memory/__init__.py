"""Memory of a rank: step captures, stack captures, snapshots."""
