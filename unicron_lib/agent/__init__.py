"""The daemon of a node: launches, supervises and stops ranks, reports what it sees, decides nothing."""
