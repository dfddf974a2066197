"""The probe: what runs inside a rank, records it and sends it to the hub."""
