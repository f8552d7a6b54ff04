"""The agents' endpoint on the control host: connections, commands, observations, liveness."""
