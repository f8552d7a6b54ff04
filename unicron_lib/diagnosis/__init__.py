"""Why a job failed, read off its logs: compression, rules, similar incidents. It observes; only the recovery acts."""
