"""From a received message to the recording and the apps."""
