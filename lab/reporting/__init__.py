"""What the lab shows: progress, tables, TensorBoard."""
