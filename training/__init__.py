"""What train.py and the recipes in data/ are made of."""
