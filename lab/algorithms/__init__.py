"""What a federation that averages weights does with them, and what travels beside."""
