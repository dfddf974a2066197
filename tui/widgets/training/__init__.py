"""The training screen: losses, marks and values at the cursor."""
