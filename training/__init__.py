"""Parts of train.py, and of the recipes in data/."""
