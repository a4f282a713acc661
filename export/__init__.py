"""A torch backbone and a method's objective become a bundle of plain ONNX graphs."""
