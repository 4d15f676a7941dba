"""The modules behind train.py and the recipes in data/."""
