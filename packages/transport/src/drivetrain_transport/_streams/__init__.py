"""Work streams: every message is acknowledged, and handled once."""
