"""The timeline and the lists of a memory snapshot."""
