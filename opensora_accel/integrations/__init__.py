"""What other libraries call, with this toolkit behind it: `diffusers` and `accelerate`, each imported on use only."""
