"""What can be observed and done on one host: processes, signals, NVML, logs, disks."""
