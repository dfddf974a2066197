"""Analysis of a run: numbers in, typed findings out. No sockets, processes, torch or textual."""
