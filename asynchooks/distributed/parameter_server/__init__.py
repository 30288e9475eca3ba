"""A parameter server in another process, on a Dask worker."""
