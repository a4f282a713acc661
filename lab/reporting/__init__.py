"""The lab's output: progress, tables, TensorBoard."""
