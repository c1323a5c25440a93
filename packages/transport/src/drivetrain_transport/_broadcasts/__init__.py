"""The last value of a topic, for whoever comes whenever."""
