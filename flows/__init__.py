"""When and in what order: the Prefect flows."""
