"""The hub's bound sockets, on this host and on TCP."""
