"""The rooms behind train.py: the sizes it chooses among, and what it shows of a model."""
