"""What other libraries call, with this toolkit behind it. Each library is imported on use only."""
