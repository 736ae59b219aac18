"""Files: what a saved model looks like."""
