"""What a configuration will need and take, from counts: memory, time, host, disk, money, and their curves."""
