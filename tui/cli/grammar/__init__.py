"""The arguments of every command, a file for each group of ``ftmon --help``. The only import is argparse."""
