"""What the lab shows: charts, progress, tables, TensorBoard."""
