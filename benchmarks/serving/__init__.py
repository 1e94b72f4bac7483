"""What `benchmarks/serve.py` is made of: the requests, the load, the checks, the pictures."""
