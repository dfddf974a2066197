"""The probe's connection to the hub: telemetry, commands, output and stacks."""
