"""Commands that put several rooms together."""
