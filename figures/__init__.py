"""What draws the pictures, and the pictures."""
