"""The simulator: what any policy makes of a trace of faults, in virtual time; Unicron's is the production code itself."""
