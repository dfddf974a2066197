"""Sources of a run's messages, a live hub or a recording, behind one interface (``base.Source``)."""
