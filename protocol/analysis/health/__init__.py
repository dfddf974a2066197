"""Loss, gradients, throughput and devices: what is wrong with a run that still trains."""
