"""What one GPU computes: weights, layers, the slot table, graphs, one step."""
