"""The probe: code that runs inside a rank, records it and sends messages to the hub."""
