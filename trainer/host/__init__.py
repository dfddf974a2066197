"""Observation and control of one host: processes, signals, NVML, logs, disks."""
