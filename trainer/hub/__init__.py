"""The hub of a run: intake, stream, recorder and control."""
