"""The probe's line to the hub: telemetry out, commands in, output and stacks."""
