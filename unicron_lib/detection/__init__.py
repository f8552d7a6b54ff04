"""From what was observed to what kind of failure it is."""
