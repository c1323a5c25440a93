"""What channels that outlive their connections have in common."""
