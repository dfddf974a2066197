"""Problems of a run that still trains: loss, gradients, throughput and devices."""
