"""What runs a script, and the results it writes."""
