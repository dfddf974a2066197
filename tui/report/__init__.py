"""Reports of runs, sweeps and other people's CSV files: charts and tables, in the terminal and as one HTML file."""
