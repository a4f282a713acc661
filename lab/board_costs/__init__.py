"""The cost of the lab's runs on real boards: the work of one device, its seconds and its joules, by cost models."""
