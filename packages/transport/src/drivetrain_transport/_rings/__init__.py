"""Records in memory that the processes of a host share."""
