"""Reports of runs, sweeps and CSV files of other tools: charts and tables, in the terminal and as one HTML file."""
