"""The arguments of every command, a file for each group of ``ftmon --help``. Importing them costs argparse alone."""
