"""Objects and the tensors in them to frames, and back."""
