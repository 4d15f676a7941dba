"""The modules behind serve.py: from a request's socket to the kernels and back."""
