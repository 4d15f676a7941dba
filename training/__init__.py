"""The rooms behind train.py and the recipes in data/."""
