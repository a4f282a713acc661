"""What the lab's runs would cost real boards: the work of one device, and its seconds and joules by the cost models."""
