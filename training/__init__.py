"""What only a training needs: the rooms behind train.py and the recipes in data/."""
