"""The HTTP part of serve.py: from a request's socket to the engine and back."""
