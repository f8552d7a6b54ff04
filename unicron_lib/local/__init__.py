"""A whole cluster on this machine: processes, ports, the demo."""
