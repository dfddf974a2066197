"""What the numbers of a run mean: numbers in, typed findings out. No sockets, processes, torch or textual."""
