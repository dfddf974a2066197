"""DeepSpeed's launchers and SLURM as they are installed, across two nodes with real ssh between them."""
