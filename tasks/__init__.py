"""One side effect each: the Prefect tasks."""
