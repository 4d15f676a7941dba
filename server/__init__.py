"""The rooms behind serve.py: from a request's socket to the kernels and back."""
