"""What Unicron knows and how it decides: standard library only, no clock, no network, no chance."""
