"""What serve.py is made of: from a request's socket to the kernels and back."""
