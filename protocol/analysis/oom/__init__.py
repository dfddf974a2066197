"""Why an allocation failed, and what would make it fit."""
