"""The outside world: S3, directories, NVML, EC2."""
