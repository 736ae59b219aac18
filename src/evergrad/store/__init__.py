"""Where a master keeps its record."""
