"""Where a run comes from: a live hub or a recording, behind one interface (``base.Source``)."""
